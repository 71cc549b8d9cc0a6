//! What people meet who run jobs: nodes that are gone for good, logs in files, folders that vanish, folders of strangers.

use crate::support::Project;
use crate::support::job::{Job, UNENDING, signal, until};
use serde_json::Value;
use std::process::Stdio;

/// The last event of a job that says from which step it continues.
fn last_incident(p: &Project) -> Option<Value> {
    let events = std::fs::read_to_string(p.path("out/events.jsonl")).ok()?;
    let incident = events.lines().rfind(|line| line.contains("\"event\":\"incident\""))?;
    serde_json::from_str(incident).ok()
}

#[test]
fn node_that_is_declared_gone_is_not_waited_for_although_the_patience_has_no_end() {
    let p = Project::new();
    let patient = ["--dp_shard_size", "1", "--elastic.replace_patience", "none", "--save_steps", "10"];
    let mut job = Job::start_with(&p, 1, &[&UNENDING[..], &patient].concat());
    until("a checkpoint", || (!p.checkpoints("out").is_empty()).then_some(()));
    job.add_node(1);
    until("a spare", || {
        let status: Value = serde_json::from_str(&p.run(&["status", "out", "--json"]).stdout).ok()?;
        (status["nodes"].as_array()?.len() == 2).then_some(())
    });
    p.run(&["drain", "out", "1", "--gone"]).refuses(&["node 1"]);

    // As a machine without power: nobody closes its connections.
    let silent = [job.ranks(0), vec![job.nodes[0].id()]].concat();
    silent.iter().for_each(|pid| signal(*pid, libc::SIGSTOP));
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(last_incident(&p).unwrap()["why"], "Started", "the job waits for the node with its state");
    p.run(&["drain", "out", "0", "--gone"]).succeeds();

    let incident = until("the next world", || last_incident(&p).filter(|incident| incident["why"] != "Started"));
    assert!(incident["n_repeated"].is_u64() || incident["first_step"].as_u64() > Some(10), "{incident}");
    let n = job.n_steps();
    until("steps", || (job.n_steps() > n + 5).then_some(()));
    job.stop();
}

#[test]
fn logs_of_a_good_job_have_no_warning_and_no_escape_codes() {
    let p = Project::new();
    let mut job = Job::start(&p, 2);
    until("the end of the nodes", || job.nodes.iter_mut().all(|node| node.try_wait().unwrap().is_some()).then_some(()));
    job.finish();

    for log in ["coordinator.log", "node0.log", "node1.log"] {
        let text = std::fs::read_to_string(p.path(log)).unwrap();
        assert!(!text.contains("WARN") && !text.contains("ERROR") && !text.contains('\x1b'), "{log}: {text}");
    }
}

#[test]
fn run_whose_folder_is_removed_ends_with_a_sentence() {
    for ranks in ["1", "2"] {
        let p = Project::new();
        let keys = [&UNENDING[..], &["--dp_shard_size", ranks, "--save_steps", "20", "--output_dir", "gone"]].concat();
        let mut command = p.command(&[&["train", "job.yaml"][..], &keys].concat());
        let mut run = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        until("a checkpoint", || (!p.checkpoints("gone").is_empty()).then_some(()));

        // The run writes meanwhile.
        until("the removal", || {
            std::fs::remove_dir_all(p.path("gone")).ok().or((!p.path("gone").exists()).then_some(()))
        });
        let ended = until("its end", || run.try_wait().unwrap());

        let mut said = String::new();
        std::io::Read::read_to_string(&mut run.stderr.take().unwrap(), &mut said).unwrap();
        assert!(!ended.success() && said.contains("gone"), "{ranks} ranks: {ended}: {said}");
    }
}

#[test]
fn demo_does_not_follow_a_link_of_its_name_in_the_folder_for_temporary_files() {
    let p = Project::new();
    let (shared, target) = (p.path("tmp"), p.path("target"));
    [&shared, &target].iter().for_each(|dir| std::fs::create_dir(dir).unwrap());
    // The program keeps the number of the shell's process.
    let script = format!(
        "for name in phalanx-demo-$$ phalanx-demo; do ln -s {} {}/$name; done; exec {} demo --steps 60",
        target.display(),
        shared.display(),
        env!("CARGO_BIN_EXE_phalanx")
    );

    let run = std::process::Command::new("sh").args(["-c", &script]).env("TMPDIR", &shared).output().unwrap();

    let n_files = std::fs::read_dir(&target).unwrap().count();
    assert_eq!(n_files, 0, "{}{}", String::from_utf8_lossy(&run.stdout), String::from_utf8_lossy(&run.stderr));
    assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr));
}

#[test]
fn reproducible_run_over_tensor_parallel_ranks_says_which_meshes_have_its_bits() {
    let p = Project::new();
    let run = p.train(&["--reproducible", "true", "--tensor_parallel_size", "2", "--max_steps", "1"]).succeeds();

    assert!(run.stdout.contains("other bits with another tensor_parallel_size"), "{}", run.stdout);
}

#[test]
fn init_says_what_it_has_guessed_and_what_is_not_there() {
    let p = Project::new();
    p.write("pairs.jsonl", "{\"prompt\": \"a\", \"better\": \"b\", \"worse\": \"c\"}\n");
    let said = |file: &str, args: &[&str]| p.run(&[&["init", file, "--yes"], args].concat()).succeeds().stdout;

    let of_columns = said("a.yaml", &["--dataset", "pairs.jsonl"]);
    let of_paths = said("b.yaml", &["--dataset", "none.jsonl", "--base-model", "./none"]);
    let of_type = said("c.yaml", &["--dataset", "pairs.jsonl", "--dataset-type", "preference"]);

    assert!(of_columns.contains("(prompt, better, worse); `type: alpaca` is a guess"), "{of_columns}");
    assert!(of_paths.contains("there is no file none.jsonl") && of_paths.contains("no folder ./none"), "{of_paths}");
    assert!(!of_type.contains("guess"), "{of_type}");
    // A file that is converted names its own data.
    p.write("trl.yaml", "model_name_or_path: base\ndataset_name: pairs.jsonl\nbeta: 0.1\n");
    let converted = said("d.yaml", &["--from", "trl.yaml"]);
    assert!(!converted.contains("there is no"), "{converted}");
}

#[test]
fn model_that_is_not_there_is_named_with_what_would_fit() {
    let p = Project::new();
    p.write("job.yaml", "base_model: ./modell\ndatasets: [{path: DIR/text.txt, type: completion}]\nmax_steps: 1\n");

    p.run(&["train", "job.yaml"]).refuses(&["there is no ./modell", "phalanx fetch"]);
}
