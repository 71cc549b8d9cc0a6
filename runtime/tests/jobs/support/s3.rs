//! The part of S3 that checkpoints need, on loopback: a bucket in memory that accepts one key and any signature, and fails as it
//! is told to.
#![allow(missing_docs)] // read by tests only

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};

const KEY: &str = "hoplite";
const DATE: &str = "Sat, 21 Nov 2026 12:00:00 GMT";

/// What the server does wrong.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    Nothing,
    /// Every request gets this status and has no effect.
    Fails(&'static str),
    /// So many further requests get status 503 and have no effect.
    IsBusyFor(usize),
    /// One request for an object with this name gets status 503 and has no effect.
    IsBusyOnceAt(&'static str),
    /// Requests of this method get status 403 and have no effect.
    Forbids(&'static str),
    /// No request is answered until the fault is over.
    Hangs,
    /// Of every three requests, in no regular order, one takes effect, but its connection ends without an answer.
    LosesAnswers,
}

#[derive(Debug, Default)]
struct Server {
    objects: Mutex<BTreeMap<String, Vec<u8>>>,
    fault: Mutex<Fault>,
    changed: Condvar,
    /// Further keys that are valid, and whether the first one has expired.
    keys: Mutex<(Vec<String>, bool)>,
    n_requests: AtomicUsize,
}

impl Server {
    /// Why the key of a request is not accepted, if it is not.
    fn refuses_key(&self, request: &Request) -> Option<Answer> {
        let authorization = request.headers.get("authorization").map_or("", String::as_str);
        let has = |key: &str| authorization.contains(&format!("Credential={key}/"));
        let (keys, is_expired) = &*self.keys.lock().unwrap();
        let body = |code: &str| format!("<Error><Code>{code}</Code></Error>").into_bytes();
        match has(KEY) {
            true if *is_expired => Some(("400 Bad Request", vec![], body("ExpiredToken"))),
            true => None,
            false if keys.iter().any(|key| has(key)) => None,
            false => Some(("403 Forbidden", vec![], body("InvalidAccessKeyId"))),
        }
    }

    /// Whether the answer to this request is lost, after waiting while the server hangs; or the failure.
    fn treat(&self, request: &Request) -> Result<bool, Answer> {
        let number = self.n_requests.fetch_add(1, Ordering::Relaxed);
        if let Some(refusal) = self.refuses_key(request) {
            return Err(refusal);
        }
        let fault = self.fault.lock().unwrap();
        let mut fault = self.changed.wait_while(fault, |fault| *fault == Fault::Hangs).unwrap();
        let busy = |status| Err((status, vec![], b"<Error><Code>SlowDown</Code></Error>".to_vec()));
        match *fault {
            Fault::Fails(status) => busy(status),
            Fault::IsBusyFor(n) if n > 0 => {
                *fault = Fault::IsBusyFor(n - 1);
                busy("503 Service Unavailable")
            }
            Fault::IsBusyOnceAt(name) if request.path.ends_with(name) => {
                *fault = Fault::Nothing;
                busy("503 Service Unavailable")
            }
            Fault::Forbids(method) if method == request.method => {
                Err(("403 Forbidden", vec![], b"<Error><Code>AccessDenied</Code></Error>".to_vec()))
            }
            // Multiplication mixes the bits of the number: no client that repeats a series of requests is in step with it.
            Fault::LosesAnswers => {
                Ok(((number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40).is_multiple_of(3))
            }
            _ => Ok(false),
        }
    }
}

/// A bucket that lives as long as the test process.
pub struct S3 {
    server: Arc<Server>,
    endpoint: String,
}

struct Request {
    method: String,
    path: String,
    query: String,
    headers: BTreeMap<String, String>,
    body: Vec<u8>,
}

type Answer = (&'static str, Vec<(&'static str, String)>, Vec<u8>);

impl S3 {
    pub fn start() -> S3 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let server = Arc::new(Server::default());
        let shared = server.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let server = shared.clone();
                std::thread::spawn(move || serve(stream, &server));
            }
        });
        S3 { server, endpoint }
    }

    /// From now on, the server has this fault.
    pub fn set(&self, fault: Fault) {
        *self.server.fault.lock().unwrap() = fault;
        self.server.changed.notify_all();
    }

    /// Sets the environment variables of a user with this key.
    pub fn known_to<'a>(&self, command: &'a mut Command, key: &str) -> &'a mut Command {
        let region = ("AWS_REGION", "eu-central-1");
        let secret = ("AWS_SECRET_ACCESS_KEY", "phalanx");
        let http = ("AWS_ALLOW_HTTP", "true");
        command.envs([region, secret, http, ("AWS_ACCESS_KEY_ID", key), ("AWS_ENDPOINT", &self.endpoint)])
    }

    /// Sets the environment variables of a user with the valid key.
    pub fn open_to<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        self.known_to(command, KEY)
    }

    /// The first key expires; from now on this one is valid.
    pub fn rotate_to(&self, key: &str) {
        *self.server.keys.lock().unwrap() = (vec![key.to_owned()], true);
    }

    /// Whether the fault is over.
    pub fn has_recovered(&self) -> bool {
        *self.server.fault.lock().unwrap() == Fault::Nothing
    }

    pub fn names(&self) -> Vec<String> {
        self.server.objects.lock().unwrap().keys().cloned().collect()
    }

    /// Deletes the objects for whose name `is_old` returns true.
    pub fn delete(&self, is_old: impl Fn(&str) -> bool) {
        self.server.objects.lock().unwrap().retain(|name, _| !is_old(name));
    }
}

fn serve(stream: TcpStream, server: &Server) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut stream = stream;
    while let Some(request) = read(&mut reader) {
        let (status, headers, body) = match server.treat(&request) {
            Err(failure) => failure,
            Ok(is_lost) => {
                let answer = answer(&request, &server.objects);
                if is_lost {
                    return;
                }
                answer
            }
        };
        let mut head = format!("HTTP/1.1 {status}\r\n");
        // The answer to HEAD has the length of the body that it omits.
        if !headers.iter().any(|(name, _)| *name == "Content-Length") {
            head += &format!("Content-Length: {}\r\n", body.len());
        }
        headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
        let sent = stream.write_all((head + "\r\n").as_bytes()).and_then(|()| stream.write_all(&body));
        if sent.is_err() {
            return;
        }
    }
}

fn read(reader: &mut impl BufRead) -> Option<Request> {
    let mut line = String::new();
    reader.read_line(&mut line).ok().filter(|n| *n > 0)?;
    let mut words = line.split(' ');
    let (method, target) = (words.next()?.to_owned(), words.next()?.to_owned());
    let mut headers = BTreeMap::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else { break };
        headers.insert(name.to_lowercase(), value.to_owned());
    }
    let len = headers.get("content-length").map_or(0, |len| len.parse().unwrap());
    let mut body = vec![0; len];
    reader.read_exact(&mut body).ok()?;
    let (path, query) = target.split_once('?').unwrap_or((&target, ""));
    Some(Request { method, path: path.to_owned(), query: query.to_owned(), headers, body })
}

fn answer(request: &Request, objects: &Mutex<BTreeMap<String, Vec<u8>>>) -> Answer {
    let mut objects = objects.lock().unwrap();
    let name = request.path.trim_start_matches("/bucket").trim_start_matches('/').to_owned();
    let etag = |content: &[u8]| format!("\"{}\"", blake3::hash(content).to_hex());
    match (request.method.as_str(), objects.get(&name)) {
        ("GET", _) if request.query.contains("list-type=2") => ("200 OK", vec![], list(&objects, &request.query)),
        ("POST", _) => {
            let body = String::from_utf8(request.body.clone()).unwrap();
            let named = |part: &str| part.split("</Key>").next().unwrap_or_default().to_owned();
            let names: Vec<String> = body.split("<Key>").skip(1).map(named).collect();
            names.iter().for_each(|name| drop(objects.remove(name)));
            let deleted: String = names.iter().map(|name| format!("<Deleted><Key>{name}</Key></Deleted>")).collect();
            ("200 OK", vec![], format!("<DeleteResult>{deleted}</DeleteResult>").into_bytes())
        }
        ("PUT", Some(_)) if request.headers.contains_key("if-none-match") => {
            ("412 Precondition Failed", vec![], vec![])
        }
        ("PUT", None) if request.headers.contains_key("if-match") => ("404 Not Found", vec![], vec![]),
        ("PUT", Some(content))
            if request.headers.get("if-match").is_some_and(|expected| *expected != etag(content)) =>
        {
            ("412 Precondition Failed", vec![], vec![])
        }
        ("PUT", _) => {
            objects.insert(name, request.body.clone());
            ("200 OK", vec![("ETag", etag(&request.body))], vec![])
        }
        (_, None) => ("404 Not Found", vec![], vec![]),
        (method, Some(content)) => {
            let about = vec![("ETag", etag(content)), ("Last-Modified", DATE.to_owned())];
            match request.headers.get("range").and_then(|range| range.strip_prefix("bytes=")?.split_once('-')) {
                _ if method == "HEAD" => {
                    ("200 OK", [about, vec![("Content-Length", content.len().to_string())]].concat(), vec![])
                }
                Some((start, last)) => {
                    let (start, last): (usize, usize) = (start.parse().unwrap(), last.parse().unwrap());
                    let range = ("Content-Range", format!("bytes {start}-{last}/{}", content.len()));
                    ("206 Partial Content", [about, vec![range]].concat(), content[start..=last].to_vec())
                }
                None => ("200 OK", about, content.clone()),
            }
        }
    }
}

fn list(objects: &BTreeMap<String, Vec<u8>>, query: &str) -> Vec<u8> {
    let prefix = query.split('&').find_map(|pair| pair.strip_prefix("prefix=")).unwrap_or_default();
    let prefix = prefix.replace("%2F", "/");
    let mut directories = std::collections::BTreeSet::new();
    let mut xml = String::from("<ListBucketResult>");
    for (name, content) in objects.iter().filter(|(name, _)| name.starts_with(&prefix)) {
        match name[prefix.len()..].split_once('/') {
            Some((directory, _)) => drop(directories.insert(directory)),
            None => {
                let about = "<LastModified>2026-11-21T12:00:00.000Z</LastModified><ETag>x</ETag>";
                xml += &format!("<Contents><Key>{name}</Key><Size>{}</Size>{about}</Contents>", content.len());
            }
        }
    }
    for directory in directories {
        xml += &format!("<CommonPrefixes><Prefix>{prefix}{directory}/</Prefix></CommonPrefixes>");
    }
    (xml + "<KeyCount>1</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>").into_bytes()
}
