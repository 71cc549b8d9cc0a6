//! Processes of a job over several nodes are killed and stopped while it trains: the weights equal those of an undisturbed
//! run.

use crate::support::job::{Addresses, JOB, Job, UNENDING, equals_undisturbed_run, reaches, signal, until};
use crate::support::{Project, Run};
use serde_json::Value;
use std::time::Duration;

#[test]
fn weights_are_unchanged_when_nodes_and_coordinator_die_and_ranks_hang() {
    let p = Project::new();
    p.train(&[&JOB[..], &["--output_dir", "straight"]].concat()).succeeds();
    let mut job = Job::start(&p, 2);

    job.until_step(10);
    signal(job.ranks(0)[0], libc::SIGKILL);
    job.until_step(30);
    signal(job.ranks(1)[0], libc::SIGSTOP);
    job.until_step(job.n_steps() + 10);
    // A whole node dies with its ranks.
    job.nodes[1].kill().unwrap();
    job.nodes[1].wait().unwrap();
    job.add_node(1);
    job.until_step(job.n_steps() + 10);
    job.restart_coordinator();
    let before = job.n_steps();
    job.until_step(before + 5);

    assert_eq!(job.finish(), p.model_bytes("straight"));
    assert_eq!(p.metrics("out").len(), 300, "every step is reported once");
    // Copies that differ would end in the same weights, from the first step on.
    let events = std::fs::read_to_string(p.path("out/events.jsonl")).unwrap();
    assert!(!events.contains("\"n_repeated\""), "a step was repeated: {events}");
}

#[test]
fn node_that_comes_after_the_end_of_the_job_tells_so_and_succeeds() {
    let p = Project::new();
    let job = Job::start(&p, 2);
    let join = job.join.clone();
    job.finish();

    let late = p.run(&["node", "--join", &join, "--dir", "late"]).succeeds();

    assert!(late.stdout.contains("has ended, well"), "{late:?}");
}

#[test]
fn nodes_of_a_failed_job_fail_too() {
    let p = Project::new();
    let diverges = ["--learning_rate", "1e30", "--max_grad_norm", "none", "--warmup_steps", "0"];
    let mut job = Job::start_with(&p, 2, &diverges);

    for node in &mut job.nodes {
        let ended = until("the end of a node", || node.try_wait().unwrap());
        assert!(matches!(ended.code(), Some(1 | 2)), "{ended}");
    }
}

#[test]
fn standby_at_another_address_takes_over_from_a_dead_coordinator() {
    let p = Project::new();
    p.train(&[&JOB[..], &["--output_dir", "straight"]].concat()).succeeds();
    let [here, there] = free_addresses();
    let advertise = Some(format!("{here},{there}"));
    let mut job = Job::start_at(&p, 2, &[], Addresses { listen: here, advertise, ..Addresses::default() });

    job.until_step(10);
    job.replace_coordinator(&there);
    // Ranks regroup only with a coordinator.
    signal(job.ranks(0)[0], libc::SIGKILL);
    let before = job.n_steps();
    job.until_step(before + 5);

    assert_eq!(job.finish(), p.model_bytes("straight"));
    assert_eq!(p.metrics("out").len(), 300, "every step is reported once");
}

#[test]
fn of_coordinators_that_start_together_one_leads_and_the_other_stands_by() {
    let p = Project::new();
    for job in 0..4 {
        let out = format!("out-{job}");
        let logs = [0, 1].map(|i| p.path(&format!("log-{job}-{i}")));
        let mut both = logs.each_ref().map(|path| {
            let log = std::fs::File::create(path).unwrap();
            let mut command = p.command(&["coordinator", "job.yaml", "--output_dir", &out]);
            command.stdout(log.try_clone().unwrap()).stderr(log).spawn().unwrap()
        });

        let is_settled = |text: String| text.contains("coordinating (term") || text.contains("another coordinator");
        let ended = until("two coordinators", || {
            let ended = both.iter_mut().any(|child| child.try_wait().unwrap().is_some());
            let settled = logs.iter().all(|log| is_settled(std::fs::read_to_string(log).unwrap()));
            (ended || settled).then_some(ended)
        });
        both.iter_mut().for_each(|child| _ = child.kill().and_then(|()| child.wait()));

        assert!(!ended, "{:?}", logs.map(|log| std::fs::read_to_string(log).unwrap()));
    }
}

/// Two free UDP addresses.
fn free_addresses() -> [String; 2] {
    let sockets = [(); 2].map(|()| std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
    sockets.map(|socket| socket.local_addr().unwrap().to_string())
}

#[test]
fn drained_node_moves_its_state_to_another() {
    let p = Project::new();
    let mut job = Job::start_with(&p, 2, &UNENDING);
    job.until_step(10);
    job.add_node(2);
    until("a spare", || {
        let status = p.run(&["status", "out", "--json"]);
        let status: Value = serde_json::from_str(&status.stdout).ok()?;
        let nodes = status["nodes"].as_array()?;
        (nodes.iter().filter(|node| node["ranks"][0]["pid"].is_u64()).count() == 3).then_some(())
    });

    signal(job.nodes[1].id(), libc::SIGTERM);
    let left = job.nodes[1].wait().unwrap();

    assert!(left.success(), "{left}");
    until("the move of the state", || {
        let events = std::fs::read_to_string(p.path("out/events.jsonl")).ok()?;
        events.contains("\"why\":\"Drains\"").then_some(())
    });
    equals_undisturbed_run(&p, job.stop(), &["--dp_shard_size", "1"]);
}

#[test]
fn job_shrinks_without_a_lost_node_and_grows_when_it_returns() {
    let p = Project::new();
    let three = ["--dp_shard_size", "3", "--elastic.replace_patience", "0"];
    let mut job = Job::start_with(&p, 3, &[&UNENDING[..], &three].concat());
    let until_mesh = |n: u64| {
        until("a mesh", || {
            let status = p.run(&["status", "out", "--json"]);
            let status: Value = serde_json::from_str(&status.stdout).ok()?;
            (status["activity"] == "running" && status["mesh"]["dp_shard"].as_u64() == Some(n)).then_some(())
        });
    };

    until_mesh(3);
    job.nodes[2].kill().unwrap();
    job.nodes[2].wait().unwrap();
    until_mesh(2);
    job.add_node(2);
    until_mesh(3);
    p.run(&["save", "out"]).succeeds();

    equals_undisturbed_run(&p, job.stop(), &["--dp_shard_size", "1"]);
}

#[test]
fn ranks_returning_from_a_smaller_world_keep_no_trace_of_recycled_memory() {
    let p = Project::new();
    // Three ranks divide no tensor evenly here.
    let three = [&UNENDING[..], &["--dp_shard_size", "3", "--elastic.replace_patience", "0"]].concat();
    let job = Job::start_at(&p, 1, &three, Addresses { ranks_per_node: 3, ..Addresses::default() });
    // Number of worlds of this size that trained.
    let n_worlds = |n_ranks: u64| {
        let text = std::fs::read_to_string(p.path("out/events.jsonl")).unwrap_or_default();
        let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let events: Vec<Value> = whole.map(|line| serde_json::from_str(line).unwrap()).collect();
        let of = |kind: &'static str| events.iter().filter(move |event| event["event"] == kind);
        let trained = |world: &&Value| of("incident").any(|incident| incident["generation"] == world["generation"]);
        of("world").filter(|world| world["mesh"]["dp_shard"] == n_ranks).filter(trained).count()
    };
    until("a whole world", || (n_worlds(3) > 0).then_some(()));

    // On an idle machine a successor may join before the others train without it.
    for n in 1..=4 {
        let before = n_worlds(3);
        // The lowest pid is the oldest rank, after whose death the others change their ranks.
        let ranks = job.ranks(0);
        signal(*if n % 2 == 1 { ranks.iter().min() } else { ranks.iter().max() }.unwrap(), libc::SIGKILL);
        until("a whole world again", || (n_worlds(3) > before).then_some(()));
    }
    // So the operator shrinks the world, too.
    for (size, words) in [(2, "2"), (3, "3")] {
        let before = n_worlds(size);
        p.run(&["resize", "out", "--dp_shard_size", words]).succeeds();
        until("a world of the new size", || (n_worlds(size) > before).then_some(()));
    }

    equals_undisturbed_run(&p, job.stop(), &["--dp_shard_size", "3"]);
}

#[test]
fn node_without_a_join_token_is_refused() {
    let p = Project::new();
    let job = Job::start(&p, 0);
    let (token, address) = job.join.rsplit_once('@').unwrap();
    let other = token[..token.len() - 1].to_owned() + if token.ends_with('a') { "b" } else { "a" };

    p.run(&["node", "--join", &format!("{other}@{address}"), "--dir", "stranger"]).refuses(&["join"]);
    p.run(&["node", "--join", "phx1.nonsense"]).refuses(&["--join"]);
}

#[test]
fn straggler_is_replaced_by_a_spare_process() {
    let p = Project::new();
    // Steps are longer than the straggler's pauses, since its progress is observed only while it runs.
    let sizes = [("hidden_size: 32", "hidden_size: 192"), ("intermediate_size: 64", "intermediate_size: 512")];
    let larger = sizes.iter().fold(crate::support::YAML.to_owned(), |yaml, (from, to)| yaml.replace(from, to));
    p.write("job.yaml", &larger);
    // A member counts as a straggler only after twenty detection times.
    let quick = ["--elastic.detection_time", "0.8", "--microbatches_per_step", "8"];
    let unending = [&UNENDING[..], &quick].concat();
    let job = Job::start_at(&p, 1, &unending, Addresses { ranks_per_node: 3, ..Addresses::default() });
    job.until_step(10);
    let status: Value = serde_json::from_str(&p.run(&["status", "out", "--json"]).stdout).unwrap();
    let ranks = status["nodes"][0]["ranks"].as_array().unwrap();
    let of_rank_1 = ranks.iter().find(|rank| rank["rank"] == 1).expect("two ranks train");
    let (slot, pid) = (&of_rank_1["member"]["slot"], of_rank_1["pid"].as_u64().unwrap() as u32);

    // Rank 1 runs a tenth of the time, until it is replaced.
    while reaches(pid, libc::SIGSTOP) {
        std::thread::sleep(Duration::from_millis(45));
        reaches(pid, libc::SIGCONT);
        std::thread::sleep(Duration::from_millis(5));
    }

    job.until_step(job.n_steps() + 5);
    equals_undisturbed_run(&p, job.stop(), &quick);
    let events = std::fs::read_to_string(p.path("out/events.jsonl")).unwrap();
    let mut events = events.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let incident = events.find(|event| event["why"] == "Straggles").expect("rank 1 counts as a straggler");
    assert_eq!(&incident["worker"]["member"]["slot"], slot, "{incident}");
}

#[test]
fn folder_of_a_running_job_is_refused_to_jobs_of_every_kind() {
    let p = Project::new();
    let mut job = Job::start_with(&p, 2, &["--max_steps", "100000"]);
    job.until_step(10);

    p.train(&[]).refuses(&["out is in use by another running job"]);
    // The ranks continue without their coordinator.
    job.coordinator.kill().unwrap();
    job.coordinator.wait().unwrap();
    let before = job.n_steps();
    p.train(&[]).refuses(&["ranks of an earlier job still run in output_dir"]);
    job.until_step(before + 5);
    drop(job);
    p.train(&["--resume_from_checkpoint", "none"]).succeeds();

    let anew = ["--max_steps", "10000000", "--dp_replicate_size", "2", "--resume_from_checkpoint", "none"];
    let mut alone = p.command(&[&["train", "job.yaml"], &anew[..]].concat());
    let mut alone = alone.stdout(std::process::Stdio::null()).spawn().unwrap();
    until("the first steps", || (p.metrics("out").last()?.0 > 25).then_some(()));
    p.run(&["coordinator", "job.yaml"]).refuses(&["out is in use by another running job"]);
    alone.kill().unwrap();
    alone.wait().unwrap();
}

#[test]
fn node_that_does_not_share_the_output_folder_is_refused_before_it_takes_part() {
    let p = Project::new();
    let job = Job::start_with(&p, 0, &["--output_dir", "out"]);
    std::fs::create_dir(p.path("elsewhere")).unwrap();

    let mut node = p.command(&["node", "--join", &job.join]);
    let refused = Run::of(node.current_dir(p.path("elsewhere")).output().unwrap());

    refused.refuses(&["output_dir out on this node is not that of job", "out/control/job", "checkpoint_dir"]);
}

#[test]
fn standby_with_another_configuration_is_refused_and_the_job_goes_on() {
    let p = Project::new();
    let job = Job::start_with(&p, 1, &["--max_steps", "100000"]);
    job.until_step(5);

    let other = ["coordinator", "job.yaml", "--max_steps", "100000", "--learning_rate", "0.5"];
    p.run(&other).refuses(&["the configuration differs from that of the running job", "out/control/config.yaml"]);

    job.stop();
}

#[test]
fn coordinator_that_starts_again_with_another_learning_rate_is_refused_and_one_with_other_log_lines_leads() {
    let p = Project::new();
    let mut job = Job::start_with(&p, 1, &["--max_steps", "100000"]);
    job.until_step(5);
    job.coordinator.kill().unwrap();
    job.coordinator.wait().unwrap();

    let again = ["coordinator", "job.yaml", "--max_steps", "100000"];
    p.run(&[&again[..], &["--learning_rate", "0.5"]].concat()).refuses(&["`learning_rate`, 0.5 instead of 0.01"]);
    job.coordinator = p.command(&[&again[..], &["--logging_steps", "7"]].concat()).spawn().unwrap();

    let now = p.metrics("out").last().map_or(0, |last| last.0);
    until("steps under the second coordinator", || (p.metrics("out").last()?.0 > now + 5).then_some(()));
    job.stop();
}

#[test]
fn drained_node_ends_although_no_coordinator_is_left_to_release_it() {
    let p = Project::new();
    let mut job = Job::start_with(&p, 1, &["--max_steps", "100000"]);
    job.until_step(5);
    job.coordinator.kill().unwrap();
    job.coordinator.wait().unwrap();

    signal(job.nodes[0].id(), libc::SIGTERM);

    until("the end of the node", || job.nodes[0].try_wait().unwrap());
}
