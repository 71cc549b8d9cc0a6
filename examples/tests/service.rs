//! Drives the service over HTTP.

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Longer than any wait of these tests takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// Steps take some milliseconds, because a reader of thousands of steps per second would miss events.
const YAML: &str = "\
model:
  model_type: llama
  hidden_size: 32
  intermediate_size: 64
  num_hidden_layers: 2
  num_attention_heads: 4
tokenizer: bytes
datasets:
  - path: DIR/text.txt
    type: completion
sequence_len: 32
micro_batch_size: 2
gradient_accumulation_steps: 32
max_steps: 1000000
learning_rate: 1e-3
dp_shard_size: 2
save_steps: none
output_dir: DIR/out
";

/// The service in a separate process. Killed with its ranks when dropped.
struct Service {
    child: Child,
    address: String,
    _dir: tempfile::TempDir,
}

impl Service {
    fn start() -> Service {
        let dir = tempfile::tempdir().unwrap();
        let at = |text: &str| text.replace("DIR", &dir.path().display().to_string());
        let text: String = (0..400).map(|i| format!("The {i}th hoplite holds the line. ")).collect();
        std::fs::write(dir.path().join("text.txt"), text).unwrap();
        std::fs::write(dir.path().join("tiny.yaml"), at(YAML)).unwrap();
        std::fs::write(
            dir.path().join("wrong.yaml"),
            at(&YAML.replace("num_attention_heads: 4", "num_attention_heads: 5")),
        )
        .unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_service"));
        command.arg(dir.path()).arg("0").stdout(Stdio::piped()).stdin(Stdio::null());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on http://").expect("it prints its address").to_owned();
        Service { child, address, _dir: dir }
    }

    /// Sends a request and returns the connection for reading the answer.
    fn send(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let n = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nhost: here\r\nconnection: close\r\n");
        let of_body = format!("content-type: application/json\r\ncontent-length: {n}\r\n\r\n");
        stream.write_all(format!("{head}{of_body}{body}").as_bytes()).unwrap();
        stream
    }

    /// Status and JSON of the answer to a request.
    fn ask(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let mut text = String::new();
        self.send(method, path, body).read_to_string(&mut text).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        let status = head.split_whitespace().nth(1).unwrap().parse().unwrap();
        (status, serde_json::from_str(body).unwrap_or(Value::Null))
    }

    fn until(&self, path: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let (_, found) = self.ask("GET", path, "");
            if wanted(&found) {
                return found;
            }
            assert!(Instant::now() < deadline, "{found}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Server-sent events of a job.
struct Events(std::io::Lines<BufReader<TcpStream>>);

impl Events {
    /// Reads up to a wanted event of this name.
    fn until(&mut self, name: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let mut found = String::new();
        for line in self.0.by_ref() {
            let line = line.unwrap();
            if let Some(name) = line.strip_prefix("event: ") {
                found = name.to_owned();
            }
            if let Some(data) = line.strip_prefix("data: ") {
                let data: Value = serde_json::from_str(data).unwrap();
                if found == name && wanted(&data) {
                    return data;
                }
            }
        }
        panic!("the stream ended without the wanted `{name}`");
    }
}

#[test]
fn job_starts_survives_a_kill_saves_and_stops_over_http() {
    let service = Service::start();

    let (created, job) = service.ask("POST", "/jobs", r#"{"config": "tiny.yaml"}"#);
    assert_eq!((created, &job["id"]), (201, &Value::from(1)), "{job}");
    let mut events = Events(BufReader::new(service.send("GET", "/jobs/1/events", "")).lines());
    let started = events.until("started", |_| true);
    let step = |events: &mut Events, n: u64| events.until("step", |m| m["step"].as_u64() >= Some(n))["step"].as_u64();
    step(&mut events, 3);
    let (_, shown) = service.ask("GET", "/jobs/1", "");
    let pids: Vec<u64> = shown["status"]["nodes"][0]["ranks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|rank| rank["pid"].as_u64().unwrap())
        .collect();
    assert!(Command::new("kill").args(["-9", &pids[1].to_string()]).status().unwrap().success());
    let incident = events.until("note", |text| text.as_str().is_some_and(|text| text.contains("died")));
    let on = step(&mut events, 0).unwrap();
    step(&mut events, on + 3);
    let (accepted, _) = service.ask("POST", "/jobs/1/save", "");
    let saved = events.until("saved", |_| true);
    let (stopping, _) = service.ask("POST", "/jobs/1/stop", "");
    let ended = service.until("/jobs/1", |job| job["state"] == "stopped");

    assert_eq!((&started["mesh"]["dp_shard"], pids.len()), (&Value::from(2), 2), "two rank processes");
    assert!(incident.as_str().unwrap().contains("slot 1"), "{incident}");
    assert_eq!((accepted, stopping), (202, 202));
    assert!(Path::new(saved["path"].as_str().unwrap()).is_dir(), "{saved}");
    assert!(ended["report"]["steps"].as_u64() >= saved["step"].as_u64() && ended["status"].is_null(), "{ended}");
    assert_eq!(service.ask("POST", "/jobs/1/save", "").0, 409, "the job has ended");
}

#[test]
fn invalid_requests_are_refused() {
    let service = Service::start();
    let start = |body: &str| service.ask("POST", "/jobs", body);

    for (status, body, says) in [
        (400, r#"{"config": "../tiny.yaml"}"#, "not the name of a YAML file"),
        (400, r#"{"config": "/etc/passwd"}"#, "not the name of a YAML file"),
        (422, r#"{"config": "missing.yaml"}"#, "missing.yaml"),
        (422, r#"{"config": "wrong.yaml"}"#, "must divide hidden_size 32"),
    ] {
        let (found, answer) = start(body);
        let error = answer["error"].as_str().unwrap_or_default();
        assert!(found == status && error.contains(says), "{body}: {found} {answer}");
    }
    assert_eq!(start(r#"{"config": "tiny.yaml", "output_dir": "/"}"#).0, 422);
    assert_eq!(start(&format!(r#"{{"config": "{}"}}"#, "x".repeat(5000))).0, 413);
    assert_eq!(service.ask("GET", "/jobs/7", "").0, 404);

    assert_eq!(start(r#"{"config": "tiny.yaml"}"#).0, 201);
    let (again, answer) = start(r#"{"config": "tiny.yaml"}"#);
    assert_eq!(again, 409, "{answer}");
}
