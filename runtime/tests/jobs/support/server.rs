//! `phalanx serve` in a process of its own, driven over HTTP.

use super::Project;
use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};
use std::time::Duration;

/// Longer than any wait of these tests takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A server in a separate process. Killed when dropped.
pub struct Server {
    pub child: Child,
    pub address: String,
    pub out: BufReader<std::process::ChildStdout>,
}

impl Server {
    pub fn start(p: &Project, args: &[&str]) -> Server {
        let mut command = p.command(&[&["serve", "--listen", "127.0.0.1:0"], args].concat());
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        out.read_line(&mut line).unwrap();
        let address = line.split_once("http://").expect(&line).1.split_once('/').expect(&line).0.to_owned();
        Server { child, address, out }
    }

    /// Sends a request and returns the connection for reading the answer.
    pub fn send(&self, method: &str, path: &str, headers: &[&str], body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let (n, more) = (body.len(), headers.iter().map(|line| format!("{line}\r\n")).collect::<String>());
        let host = if more.to_lowercase().contains("host:") { "" } else { "host: localhost\r\n" };
        let head = format!("{method} {path} HTTP/1.1\r\n{host}{more}connection: close\r\ncontent-length: {n}\r\n\r\n");
        // A server that refuses a long body does not read it all.
        let _ = stream.write_all(format!("{head}{body}").as_bytes());
        stream
    }

    /// Status and text of the answer to a request.
    pub fn ask(&self, method: &str, path: &str, headers: &[&str], body: &str) -> (u16, String) {
        answer_of(self.send(method, path, headers, body))
    }

    pub fn get(&self, path: &str) -> (u16, Value) {
        let (status, text) = self.ask("GET", path, &[], "");
        (status, serde_json::from_str(&text).unwrap())
    }

    pub fn post(&self, path: &str, body: &Value) -> (u16, Value) {
        let (status, text) = self.ask("POST", path, &[JSON], &body.to_string());
        (status, serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}")))
    }

    /// The answer to a request that succeeds.
    pub fn completed(&self, body: &Value) -> Value {
        let (status, answer) = self.post("/v1/completions", body);
        assert_eq!(status, 200, "{answer}");
        answer
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub const JSON: &str = "content-type: application/json";

/// Status and body of an answer; chunks are joined.
pub fn answer_of(stream: TcpStream) -> (u16, String) {
    let mut reader = BufReader::new(stream);
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    let status = line.split_whitespace().nth(1).unwrap_or_else(|| panic!("{line}")).parse().unwrap();
    let mut is_chunked = false;
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        is_chunked |= line.to_lowercase().starts_with("transfer-encoding: chunked");
        if line.trim().is_empty() {
            break;
        }
    }
    let mut body = Vec::new();
    if is_chunked {
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line).unwrap() == 0 {
                break;
            }
            let n = usize::from_str_radix(line.trim(), 16).unwrap();
            let mut chunk = vec![0; n + 2];
            reader.read_exact(&mut chunk).unwrap();
            body.extend_from_slice(&chunk[..n]);
            if n == 0 {
                break;
            }
        }
    } else {
        reader.read_to_end(&mut body).unwrap();
    }
    (status, String::from_utf8(body).unwrap())
}
