//! Tests of [`super`] against servers of this machine that speak the Hub's protocol. `tests/peers/hub_push.py` compares the requests with those
//! of the Hub's own client.

use super::*;
use crate::hub::cache::HubCache;
use crate::hub::name::MAIN;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Mutex;

const TOKEN: &str = "hf_secret";
const MODEL: &str = "me/tiny";
/// Bytes of a part of a large file.
const PART: usize = 700_000;

/// What has arrived, and what goes wrong.
#[derive(Default)]
struct State {
    address: String,
    /// Method and path of each request, and whether it had the token.
    seen: Vec<(String, bool)>,
    /// Files in large file storage, by hash; parts before they are joined.
    stored: BTreeMap<String, Vec<u8>>,
    parts: BTreeMap<String, Vec<u8>>,
    /// Lines of the commits.
    commits: Vec<Vec<Value>>,
    is_private: Option<bool>,
    /// Requests to storage that fail from now on.
    n_failing: usize,
    /// The status of everything that creates or changes a model.
    refuses: Option<u16>,
}

/// A Hub with its storage; it lives as long as the test process.
#[derive(Clone)]
struct FakeHub(Arc<Mutex<State>>);

impl FakeHub {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let hub = Self(Arc::new(Mutex::new(State { address, ..State::default() })));
        let state = hub.0.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let _ = serve(stream.unwrap(), &state);
            }
        });
        hub
    }

    fn client(&self, token: Option<&str>) -> Hub {
        let address = self.0.lock().unwrap().address.clone();
        let cache = HubCache::at(PathBuf::from("/nonexistent"));
        Hub::at(&address, token.map(str::to_owned), cache).with_pause(Duration::from_millis(1))
    }

    fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.0.lock().unwrap())
    }
}

fn serve(stream: TcpStream, state: &Mutex<State>) -> io::Result<()> {
    let mut input = BufReader::new(stream.try_clone()?);
    let (mut line, mut n_bytes, mut has_token) = (String::new(), 0, false);
    input.read_line(&mut line)?;
    loop {
        let mut header = String::new();
        input.read_line(&mut header)?;
        match header.trim().to_ascii_lowercase().split_once(": ") {
            Some(("content-length", value)) => n_bytes = value.parse().unwrap(),
            Some(("authorization", value)) => has_token = value == format!("bearer {TOKEN}"),
            Some(_) => {}
            None => break,
        }
    }
    let mut body = vec![0; n_bytes];
    input.read_exact(&mut body)?;
    let request = line.rsplit_once(' ').unwrap().0.to_owned();
    let mut state = state.lock().unwrap();
    state.seen.push((request.clone(), has_token));
    let (status, headers, answer) = answer(&mut state, &request, body);
    let mut stream = stream;
    write!(
        stream,
        "HTTP/1.1 {status} x\r\n{headers}content-length: {}\r\nconnection: close\r\n\r\n{answer}",
        answer.len()
    )
}

/// Status, further headers and body.
type Answer = (u16, String, String);

fn ok(answer: &Value) -> Answer {
    (200, String::new(), answer.to_string())
}

fn failure(status: u16) -> Answer {
    (status, String::new(), String::new())
}

fn answer(state: &mut State, request: &str, body: Vec<u8>) -> Answer {
    let (_method, path) = request.split_once(' ').unwrap();
    if let Some(status) = state.refuses.filter(|_| path.contains("/api/repos") || path.contains("/preupload/")) {
        return failure(status);
    }
    let json = || serde_json::from_slice::<Value>(&body).unwrap();
    match path {
        "/api/repos/create" => created(state, &json()),
        "/api/models/me/tiny" => ok(&json!({})),
        "/api/models/me/tiny/preupload/main" => {
            let files: Vec<Value> = json()["files"].as_array().unwrap().iter().map(mode).collect();
            ok(&json!({ "files": files }))
        }
        "/me/tiny.git/info/lfs/objects/batch" => {
            let objects: Vec<Value> =
                json()["objects"].as_array().unwrap().iter().map(|object| actions(state, object)).collect();
            ok(&json!({ "transfer": "basic", "objects": objects }))
        }
        "/api/models/me/tiny/commit/main" => {
            let lines = body.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
            state.commits.push(lines.map(|line| serde_json::from_slice(line).unwrap()).collect());
            ok(&json!({ "commitUrl": format!("{}/me/tiny/commit/1", state.address), "commitOid": "1" }))
        }
        "/complete" => joined(state, &json()),
        "/verify" => {
            let stored = json();
            let found = state.stored.get(stored["oid"].as_str().unwrap()).map(|bytes| bytes.len() as u64);
            if found == stored["size"].as_u64() { ok(&json!({})) } else { failure(400) }
        }
        _ => stored(state, path, body),
    }
}

fn created(state: &mut State, wanted: &Value) -> Answer {
    assert_eq!((&wanted["name"], &wanted["organization"]), (&"tiny".into(), &"me".into()));
    let is_new = state.is_private.is_none();
    state.is_private = state.is_private.or(Some(wanted["private"] == true));
    if is_new { ok(&json!({ "url": "" })) } else { failure(409) }
}

fn mode(file: &Value) -> Value {
    let (path, n) = (file["path"].as_str().unwrap(), file["size"].as_u64().unwrap());
    assert_eq!(STANDARD.decode(file["sample"].as_str().unwrap()).unwrap().len() as u64, n.min(512));
    let mode = if path.ends_with(".safetensors") { "lfs" } else { "regular" };
    json!({ "path": path, "uploadMode": mode, "shouldIgnore": path.ends_with(".log") })
}

/// What is to be done with a file: nothing if it is there, and parts if it is large.
fn actions(state: &State, object: &Value) -> Value {
    let (address, oid) = (&state.address, object["oid"].as_str().unwrap());
    let n = object["size"].as_u64().unwrap() as usize;
    if state.stored.contains_key(oid) {
        return json!({ "oid": oid, "size": n });
    }
    let mut upload = json!({ "href": format!("{address}/storage/{oid}") });
    if n > PART {
        upload = json!({ "href": format!("{address}/complete"), "header": { "chunk_size": PART.to_string() } });
        for part in 1..=n.div_ceil(PART) {
            upload["header"][part.to_string()] = format!("{address}/part/{oid}/{part:05}").into();
        }
    }
    let verify = json!({ "href": format!("{address}/verify") });
    json!({ "oid": oid, "size": n, "actions": { "upload": upload, "verify": verify } })
}

fn joined(state: &mut State, wanted: &Value) -> Answer {
    let oid = wanted["oid"].as_str().unwrap();
    let of_file = state.parts.iter().filter(|(name, _)| name.contains(oid));
    let parts: Vec<Vec<u8>> = of_file.map(|(_, part)| part.clone()).collect();
    let etags: Vec<String> = (1..=parts.len()).map(|part| format!("\"{part}\"")).collect();
    let told: Vec<&str> =
        wanted["parts"].as_array().unwrap().iter().map(|part| part["etag"].as_str().unwrap()).collect();
    assert_eq!(told, etags);
    state.stored.insert(oid.to_owned(), parts.concat());
    ok(&json!({}))
}

/// Uploads of files and their parts.
fn stored(state: &mut State, path: &str, body: Vec<u8>) -> Answer {
    if state.n_failing > 0 {
        state.n_failing -= 1;
        return failure(503);
    }
    if let Some(oid) = path.strip_prefix("/storage/") {
        state.stored.insert(oid.to_owned(), body);
        return ok(&json!({}));
    }
    let part: usize = path.strip_prefix("/part/").unwrap().rsplit('/').next().unwrap().parse().unwrap();
    state.parts.insert(path.to_owned(), body);
    (200, format!("etag: \"{part}\"\r\n"), String::new())
}

/// A folder with small and large files, one that the Hub ignores, and what is no file of it.
fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(dir.path().join(name), bytes).unwrap();
    write("config.json", b"{}");
    write("empty.safetensors", b"");
    write("run.log", b"noise");
    write(".hidden", b"secret");
    write("model.safetensors", &bytes(3 * PART + 5));
    std::fs::create_dir(dir.path().join("adapter")).unwrap();
    write("adapter/adapter.safetensors", &bytes(1000));
    std::os::unix::fs::symlink("/etc/passwd", dir.path().join("passwd.json")).unwrap();
    dir
}

fn bytes(n: usize) -> Vec<u8> {
    (0..n).map(|i| (i * i % 251) as u8).collect()
}

fn push(hub: &Hub, folder: &Path) -> Result<(Pushed, Vec<u64>), HubError> {
    let (name, revision) = (RepoName::parse(MODEL).unwrap(), MAIN.to_owned());
    let push = Push { name, revision, folder: folder.to_owned(), message: "Step 5".to_owned() };
    let mut done = Vec::new();
    let pushed = hub.push(&push, &mut |progress| done.push(progress.done_bytes))?;
    Ok((pushed, done))
}

// PUSH-1, PUSH-3
#[test]
fn files_of_a_folder_become_one_commit() {
    let (hub, dir) = (FakeHub::start(), folder());
    let client = hub.client(Some(TOKEN));

    client.create(&RepoName::parse(MODEL).unwrap(), MAIN, true).unwrap();
    let (pushed, done) = push(&client, dir.path()).unwrap();

    let whole = 2 + 3 * PART as u64 + 5 + 1000;
    assert_eq!((pushed.n_files, pushed.total_bytes, pushed.known_bytes), (4, whole, 0));
    assert!(pushed.commit.ends_with("/me/tiny/commit/1"), "{}", pushed.commit);
    assert!(done.is_sorted() && *done.last().unwrap() <= whole, "{done:?}");
    hub.with(|state| {
        assert_eq!(state.is_private, Some(true));
        let [lines] = &state.commits[..] else { panic!("one commit") };
        assert_eq!(lines[0]["value"]["summary"], "Step 5");
        let of = |key: &str| {
            lines.iter().filter(|line| line["key"] == key).map(|line| line["value"].clone()).collect::<Vec<_>>()
        };
        let names =
            |key: &str| of(key).iter().map(|value| value["path"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
        assert_eq!(names("file"), ["config.json", "empty.safetensors"]);
        assert_eq!(names("lfsFile"), ["adapter/adapter.safetensors", "model.safetensors"]);
        assert_eq!(of("file")[0]["content"], STANDARD.encode("{}"));
        let stored = |at: usize| &state.stored[of("lfsFile")[at]["oid"].as_str().unwrap()];
        assert_eq!((stored(0), stored(1)), (&bytes(1000), &bytes(3 * PART + 5)));
        assert!(state.seen.last().unwrap().0.ends_with("commit/main"), "the commit comes last");
    });
}

// PUSH-2
#[test]
fn token_goes_to_the_hub_and_not_to_its_storage() {
    let (hub, dir) = (FakeHub::start(), folder());

    push(&hub.client(Some(TOKEN)), dir.path()).unwrap();

    let is_of_storage = |request: &str| request.contains("/storage/") || request.contains("/part/");
    hub.with(|state| {
        assert!(state.seen.iter().filter(|(request, _)| is_of_storage(request)).count() >= 5);
        state.seen.iter().for_each(|(request, has_token)| assert_eq!(*has_token, !is_of_storage(request), "{request}"));
    });
}

#[test]
fn storage_that_fails_is_asked_again_and_what_it_has_is_not_sent_again() {
    let (hub, dir) = (FakeHub::start(), folder());
    hub.with(|state| state.n_failing = 3);

    push(&hub.client(Some(TOKEN)), dir.path()).unwrap();
    let before = hub.with(|state| state.seen.len());
    let (again, _) = push(&hub.client(Some(TOKEN)), dir.path()).unwrap();

    assert_eq!(again.known_bytes, 3 * PART as u64 + 5 + 1000);
    hub.with(|state| assert!(state.seen[before..].iter().all(|(request, _)| request.starts_with("POST"))));
    hub.with(|state| (state.stored.clear(), state.n_failing = 100));
    let failed = push(&hub.client(Some(TOKEN)), dir.path()).unwrap_err();
    assert!(matches!(failed, HubError::Network { .. }), "{failed}");
    assert_eq!(hub.with(|state| state.commits.len()), 2, "nothing is committed");
}

#[test]
fn model_that_may_not_be_written_is_refused_before_anything_is_sent() {
    let (hub, dir) = (FakeHub::start(), folder());
    let name = RepoName::parse(MODEL).unwrap();
    let no_token = hub.client(None);

    for refused in [no_token.create(&name, MAIN, false).unwrap_err(), push(&no_token, dir.path()).unwrap_err()] {
        assert_eq!(refused, HubError::NoToken { name: name.clone() });
    }
    assert_eq!(hub.with(|state| state.seen.len()), 0);
    hub.with(|state| state.refuses = Some(403));
    let client = hub.client(Some(TOKEN));
    client.create(&name, MAIN, false).expect("who may write need not be allowed to create");
    let refused = push(&client, dir.path()).unwrap_err().to_string();
    assert!(refused.contains("me/tiny on the branch main (status 403)"), "{refused}");
    for revision in ["a?b", "../x", "a#b", "%2e", ""] {
        let refused = client.create(&name, revision, false).unwrap_err();
        assert!(matches!(refused, HubError::Revision { .. }), "{revision}: {refused}");
    }
    let empty = tempfile::tempdir().unwrap();
    assert!(matches!(push(&client, empty.path()), Err(HubError::NothingToPush { .. })));
}

#[test]
fn model_that_is_there_is_not_created_again() {
    let hub = FakeHub::start();
    let (client, name) = (hub.client(Some(TOKEN)), RepoName::parse(MODEL).unwrap());

    for _ in 0..2 {
        client.create(&name, MAIN, false).unwrap();
    }

    assert_eq!(hub.with(|state| state.is_private), Some(false));
}
