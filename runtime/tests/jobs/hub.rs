//! Jobs whose model goes to the Hub at the end. What goes where is tested in `phalanx-storage`, and with the Hub's own client in
//! `tests/peers/hub_push.py`.

use crate::support::{Project, Run};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

const JOB: [&str; 6] = ["--max_steps", "3", "--hub_model_id", "me/tiny", "--reproducible", "true"];

/// A Hub that wants all files in git, and whose commits may have a status of failure.
struct Hub {
    address: String,
    /// The status of commits, and those that came.
    state: Arc<Mutex<(u16, Vec<String>)>>,
}

impl Hub {
    fn start(status: u16) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(Mutex::new((status, Vec::new())));
        let shared = state.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let _ = serve(stream.unwrap(), &shared);
            }
        });
        Hub { address, state }
    }

    fn train(&self, p: &Project) -> Run {
        let mut command = p.command(&[&["train", "job.yaml"], &JOB[..]].concat());
        command.env("HF_ENDPOINT", &self.address).env("HF_TOKEN", "hf_secret");
        Run::of(command.output().unwrap())
    }

    /// The entries of the only commit.
    fn commit(&self) -> Vec<Value> {
        let state = self.state.lock().unwrap();
        let [commit] = &state.1[..] else { panic!("one commit: {:?}", state.1) };
        commit.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

fn serve(mut stream: TcpStream, state: &Mutex<(u16, Vec<String>)>) -> std::io::Result<()> {
    let mut input = BufReader::new(stream.try_clone()?);
    let (mut request, mut n_bytes) = (String::new(), 0);
    input.read_line(&mut request)?;
    loop {
        let mut header = String::new();
        input.read_line(&mut header)?;
        match header.trim().to_ascii_lowercase().split_once(": ") {
            Some(("content-length", n)) => n_bytes = n.parse().unwrap(),
            Some(_) => {}
            None => break,
        }
    }
    let mut body = vec![0; n_bytes];
    input.read_exact(&mut body)?;
    let body = String::from_utf8(body).unwrap();
    let (mut status, mut answer) = (200, json!({}));
    if request.contains("/preupload/") {
        let asked: Value = serde_json::from_str(&body).unwrap();
        let in_git = |file: &Value| json!({ "path": file["path"], "uploadMode": "regular", "shouldIgnore": false });
        answer["files"] = asked["files"].as_array().unwrap().iter().map(in_git).collect();
    } else if request.contains("/commit/") {
        let mut state = state.lock().unwrap();
        status = state.0;
        state.1.push(body);
        answer["commitOid"] = "c0ffee".into();
    }
    let answer = answer.to_string();
    write!(stream, "HTTP/1.1 {status} x\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{answer}", answer.len())
}

#[test]
fn trained_model_is_one_commit_on_the_hub() {
    let (p, hub) = (Project::new(), Hub::start(200));

    let run = hub.train(&p).succeeds();

    assert!(run.stdout.contains("me/tiny: ") && run.stdout.contains(", as c0ffee"), "{}", run.stdout);
    let commit = hub.commit();
    assert_eq!(commit[0]["value"]["summary"], "Trained to step 3");
    let names: Vec<&str> = commit[1..].iter().map(|entry| entry["value"]["path"].as_str().unwrap()).collect();
    assert!(names.contains(&"model.safetensors") && names.contains(&"config.json"), "{names:?}");
    assert!(!run.stdout.contains("hf_secret") && !run.stderr.contains("hf_secret"));
}

#[test]
fn model_that_the_hub_does_not_take_stays_and_the_way_to_upload_it_is_told() {
    let (p, hub) = (Project::new(), Hub::start(403));

    let run = hub.train(&p);

    assert_eq!(run.code, Some(2), "{run:?}");
    assert!(
        run.stdout.contains("try again with:  phalanx push ") && run.stdout.contains("out/model me/tiny"),
        "{}",
        run.stdout
    );
    assert!(run.stderr.contains("the Hub does not take me/tiny on the branch main (status 403)"), "{}", run.stderr);
    assert!(!p.model_bytes("out").is_empty());
}

#[test]
fn job_that_may_not_upload_is_refused_before_it_trains() {
    let p = Project::new();
    let run = |name: &str| {
        let mut command = p.command(&["train", "job.yaml", "--hub_model_id", name]);
        command.env_remove("HF_TOKEN").env_remove("HUGGING_FACE_HUB_TOKEN").env("HF_HOME", p.path("no-token"));
        Run::of(command.output().unwrap())
    };

    let refused = [run("me/tiny"), run("no name")];
    let no_branch = p.train(&["--hub_model_id", "me/tiny", "--hub_revision", "a?b"]);

    for (run, why) in refused.iter().zip(["HF_TOKEN", "the name of a model on the Hub, such as me/my-model"]) {
        assert!(run.code == Some(2) && run.stderr.contains(why), "{run:?}");
    }
    no_branch.refuses(&["the revision \"a?b\" cannot be the name of a branch"]);
    assert!(!p.path("out").exists());
    p.run(&["push", ".", "me/tiny"]).refuses(&["has no config.json or adapter_config.json"]);
}
