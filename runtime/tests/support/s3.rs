//! The part of S3 that checkpoints need, on loopback: a bucket in memory that accepts one key and any signature.
#![allow(dead_code, missing_docs)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};

const KEY: &str = "hoplite";
const DATE: &str = "Sat, 21 Nov 2026 12:00:00 GMT";

type Objects = Arc<Mutex<BTreeMap<String, Vec<u8>>>>;

/// A bucket that lives as long as the test process.
pub struct S3 {
    objects: Objects,
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
        let objects = Objects::default();
        let shared = objects.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let objects = shared.clone();
                std::thread::spawn(move || serve(stream, &objects));
            }
        });
        S3 { objects, endpoint }
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

    pub fn names(&self) -> Vec<String> {
        self.objects.lock().unwrap().keys().cloned().collect()
    }

    /// Deletes the objects for whose name `is_old` returns true.
    pub fn delete(&self, is_old: impl Fn(&str) -> bool) {
        self.objects.lock().unwrap().retain(|name, _| !is_old(name));
    }
}

fn serve(stream: TcpStream, objects: &Objects) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut stream = stream;
    while let Some(request) = read(&mut reader) {
        let (status, headers, body) = answer(&request, objects);
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

fn answer(request: &Request, objects: &Objects) -> Answer {
    let signed = request.headers.get("authorization").is_some_and(|a| a.contains(&format!("Credential={KEY}/")));
    if !signed {
        return ("403 Forbidden", vec![], b"<Error><Code>InvalidAccessKeyId</Code></Error>".to_vec());
    }
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
