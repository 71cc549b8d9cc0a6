//! Tests of [`super`] against servers of this machine that speak the Hub's protocol.

use super::super::connection::REPEATS;
use super::*;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const TOKEN: &str = "hf_secret";

/// A request that arrived: its path, and the headers that matter.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Seen {
    path: String,
    range: Option<String>,
    has_token: bool,
}

#[derive(Default)]
struct State {
    /// Answers by path: status line with headers, and body.
    answers: BTreeMap<String, (String, Vec<u8>)>,
    seen: Vec<Seen>,
    /// For each of the next requests, the number of bytes of the body after which the connection ends.
    cuts: Vec<usize>,
}

/// A server that lives as long as the test process.
#[derive(Clone)]
struct Server {
    state: Arc<Mutex<State>>,
    address: String,
}

impl Server {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let server = Self { state: Arc::default(), address };
        let state = Arc::clone(&server.state);
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let _ = serve(stream.unwrap(), &state);
            }
        });
        server
    }

    fn answer(&self, path: &str, head: &str, body: &[u8]) {
        self.state.lock().unwrap().answers.insert(path.to_owned(), (head.to_owned(), body.to_owned()));
    }

    fn seen(&self, part: &str) -> Vec<Seen> {
        let state = self.state.lock().unwrap();
        state.seen.iter().filter(|seen| seen.path.contains(part)).cloned().collect()
    }

    fn cut(&self, n_bytes: usize) {
        self.state.lock().unwrap().cuts.push(n_bytes);
    }
}

fn serve(stream: TcpStream, state: &Mutex<State>) -> io::Result<()> {
    let mut input = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    input.read_line(&mut line)?;
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let (mut range, mut has_token) = (None, false);
    loop {
        let mut header = String::new();
        input.read_line(&mut header)?;
        let header = header.trim().to_ascii_lowercase();
        match header.split_once(": ") {
            Some(("range", value)) => range = Some(value.to_owned()),
            Some(("authorization", value)) => has_token = value == format!("bearer {TOKEN}"),
            Some(_) => {}
            None => break,
        }
    }
    let mut state = state.lock().unwrap();
    state.seen.push(Seen { path: path.clone(), range: range.clone(), has_token });
    let (head, body) = state.answers.get(&path).cloned().unwrap_or_else(|| ("404 Not Found\r\n".into(), Vec::new()));
    let cut = if path.contains("resolve") || path.contains("cdn") { state.cuts.pop() } else { None };
    drop(state);
    let mut stream = stream;
    let start = range.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse::<usize>().ok());
    let (head, body) = match start.filter(|_| head.starts_with("200")) {
        Some(start) if !head.contains("no-ranges") => {
            let range = format!("content-range: bytes {start}-{}/{}\r\n", body.len() - 1, body.len());
            (format!("206 Partial Content\r\n{range}"), body[start..].to_vec())
        }
        _ => (head, body),
    };
    let shown = &body[..cut.unwrap_or(body.len()).min(body.len())];
    write!(stream, "HTTP/1.1 {head}content-length: {}\r\nconnection: close\r\n\r\n", body.len())?;
    stream.write_all(shown)
}

fn hex_of(hash: &crate::hub::listing::Hash, content: &[u8]) -> String {
    let mut hasher = Hasher::new(hash, content.len() as u64);
    hasher.update(content);
    hasher.hex()
}

/// A Hub with one data set: a text in git, and a large file whose storage is another server.
struct World {
    hub: Server,
    storage: Server,
    dir: tempfile::TempDir,
    large: Vec<u8>,
}

const LARGE: &str = "/datasets/owner/set/resolve/0123456789abcdef0123456789abcdef01234567/data/train%20a.parquet";

impl World {
    fn new() -> Self {
        use crate::hub::listing::Hash;
        let (hub, storage) = (Server::start(), Server::start());
        let large: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
        let git = hex_of(&Hash::Git(String::new()), b"# Card\n");
        let sha = hex_of(&Hash::Sha256(String::new()), &large);
        let listing = serde_json::json!({"sha": COMMIT, "siblings": [
            {"rfilename": "README.md", "size": 7, "blobId": git},
            {"rfilename": "data/train a.parquet", "size": large.len(), "blobId": git,
             "lfs": {"sha256": sha, "size": large.len(), "pointerSize": 130}},
        ]});
        hub.answer("/api/datasets/owner/set/revision/main?blobs=true", "200 OK\r\n", listing.to_string().as_bytes());
        hub.answer(&format!("/datasets/owner/set/resolve/{COMMIT}/README.md"), "200 OK\r\n", b"# Card\n");
        hub.answer(LARGE, &format!("302 Found\r\nlocation: {}/cdn/large\r\n", storage.address), b"");
        storage.answer("/cdn/large", "200 OK\r\n", &large);
        Self { hub, storage, dir: tempfile::tempdir().unwrap(), large }
    }

    fn fetch(&self) -> Result<Fetched, HubError> {
        let cache = HubCache::at(self.dir.path());
        let hub = Hub::at(&self.hub.address, Some(TOKEN.to_owned()), cache).with_pause(Duration::from_millis(1));
        hub.fetch(&request("owner/set"), &mut |_| ())
    }

    fn large_file(&self) -> PathBuf {
        self.dir.path().join(format!("datasets--owner--set/snapshots/{COMMIT}/data/train a.parquet"))
    }
}

fn request(name: &str) -> Request {
    let name = RepoName::parse(name).unwrap();
    Request { kind: Kind::Dataset, name, revision: "main".to_owned(), all: false }
}

// FETCH-4
#[test]
fn data_set_is_in_the_cache_as_the_hubs_client_leaves_it() {
    let world = World::new();

    let fetched = world.fetch().unwrap();

    assert_eq!((fetched.n_files, fetched.total_bytes), (2, 7 + world.large.len() as u64));
    let found = HubCache::at(world.dir.path()).snapshot(Kind::Dataset, &request("owner/set").name, "main");
    assert_eq!(found, Some(fetched.snapshot.clone()));
    assert_eq!(fs::read(fetched.snapshot.join("README.md")).unwrap(), b"# Card\n");
    assert_eq!(fs::read(world.large_file()).unwrap(), world.large);
    let link = fs::read_link(world.large_file()).unwrap();
    assert!(link.starts_with("../../../blobs"), "{}", link.display());
    assert!(world.hub.seen("").iter().all(|seen| seen.has_token));
    assert!(world.storage.seen("cdn").iter().all(|seen| !seen.has_token));
}

// FETCH-3
#[test]
fn interrupted_download_continues_where_it_stopped() {
    let world = World::new();
    world.storage.cut(400_000);
    world.storage.cut(500_000);

    world.fetch().unwrap();

    let ranges: Vec<Option<String>> = world.storage.seen("cdn").into_iter().map(|seen| seen.range).collect();
    assert_eq!(ranges.len(), 3, "{ranges:?}");
    assert_eq!(ranges[0], None);
    assert!(ranges[1..].iter().all(Option::is_some), "{ranges:?}");
    assert_eq!(fs::read(world.large_file()).unwrap(), world.large);
    world.fetch().unwrap();
    assert_eq!(world.storage.seen("cdn").len(), 3, "a complete file is not downloaded again");
}

#[test]
fn server_without_ranges_sends_the_file_again() {
    let world = World::new();
    world.storage.answer("/cdn/large", "200 OK\r\nx: no-ranges\r\n", &world.large);
    world.storage.cut(500_000);

    world.fetch().unwrap();

    assert_eq!(fs::read(world.large_file()).unwrap(), world.large);
}

// FETCH-1
#[test]
fn file_is_downloaded_beside_a_process_that_makes_no_progress() {
    let world = World::new();
    let hash = hex_of(&crate::hub::listing::Hash::Sha256(String::new()), &world.large);
    let blobs = world.dir.path().join("datasets--owner--set/blobs");
    fs::create_dir_all(&blobs).unwrap();
    let stuck = File::create(blobs.join(hash).with_extension("incomplete")).unwrap();
    stuck.lock().unwrap();

    world.fetch().unwrap();

    assert_eq!(fs::read(world.large_file()).unwrap(), world.large);
}

// FETCH-1
#[test]
fn file_with_another_hash_is_not_kept() {
    let world = World::new();
    let mut other = world.large.clone();
    other[700_000] ^= 1;
    world.storage.answer("/cdn/large", "200 OK\r\n", &other);

    let error = world.fetch().unwrap_err();

    assert_eq!(error, HubError::Damaged { file: "data/train a.parquet".into() });
    let blobs = fs::read_dir(world.dir.path().join("datasets--owner--set/blobs")).unwrap();
    assert_eq!(blobs.count(), 1, "only the card");
    assert!(HubCache::at(world.dir.path()).snapshot(Kind::Dataset, &request("owner/set").name, "main").is_none());
    world.storage.answer("/cdn/large", "200 OK\r\n", &[&world.large[..], b"more"].concat());
    assert!(matches!(world.fetch().unwrap_err(), HubError::Damaged { .. }));
}

// FETCH-2
#[test]
fn listing_that_names_a_path_outside_writes_nothing() {
    let world = World::new();
    let listing = serde_json::json!({"sha": COMMIT, "siblings": [
        {"rfilename": "../../../evil", "size": 1, "blobId": "a".repeat(40)}]});
    world.hub.answer("/api/datasets/owner/set/revision/main?blobs=true", "200 OK\r\n", listing.to_string().as_bytes());

    assert!(matches!(world.fetch().unwrap_err(), HubError::Listing { .. }));
    assert_eq!(fs::read_dir(world.dir.path()).unwrap().count(), 0);
}

#[test]
fn repository_that_is_absent_or_private_is_named_with_a_way_out() {
    let world = World::new();
    let hub = Hub::at(&world.hub.address, None, HubCache::at(world.dir.path()));

    let error = hub.fetch(&request("owner/none"), &mut |_| ()).unwrap_err();
    let model = hub.fetch(&Request { kind: Kind::Model, ..request("owner/set") }, &mut |_| ()).unwrap_err();
    let revision = hub.fetch(&Request { revision: "../x".into(), ..request("owner/set") }, &mut |_| ());

    assert!(error.to_string().contains("no dataset owner/none") && error.to_string().contains("HF_TOKEN"), "{error}");
    assert!(model.to_string().contains("`--dataset`"), "{model}");
    assert!(matches!(revision, Err(HubError::Revision { .. })));
    assert!(error.is_input());
}

#[test]
fn busy_server_is_asked_again_and_a_dead_one_is_named() {
    let world = World::new();
    world.storage.answer("/cdn/large", "503 Service Unavailable\r\n", b"");

    let error = world.fetch().unwrap_err();

    assert!(error.to_string().contains("503"), "{error}");
    assert_eq!(world.storage.seen("cdn").len(), 1 + REPEATS as usize);
    assert!(!error.is_input());
}

#[test]
fn offline_mode_answers_from_the_cache_and_asks_no_server() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("datasets--owner--set");
    fs::create_dir_all(folder.join("refs")).unwrap();
    fs::write(folder.join("refs/main"), COMMIT).unwrap();
    fs::create_dir_all(folder.join("snapshots").join(COMMIT).join("data")).unwrap();
    fs::write(folder.join("snapshots").join(COMMIT).join("data/a.jsonl"), b"{}\n").unwrap();
    let server = Server::start();
    let hub = Hub { offline: true, ..Hub::at(&server.address, None, HubCache::at(dir.path())) };

    let fetched = hub.fetch(&request("owner/set"), &mut |_| ()).unwrap();
    let error = hub.fetch(&request("owner/other"), &mut |_| ()).unwrap_err();

    assert_eq!((fetched.n_files, fetched.total_bytes), (1, 3));
    assert!(error.is_input() && error.to_string().contains("HF_HUB_OFFLINE"), "{error}");
    assert!(server.seen("").is_empty());
    let offline = |set: &str, value: &str| is_offline(|name| (name == set).then(|| value.to_owned()));
    assert!(
        offline("HF_HUB_OFFLINE", "1") && offline("TRANSFORMERS_OFFLINE", "true") && offline("HF_HUB_OFFLINE", "Yes")
    );
    assert!(!offline("HF_HUB_OFFLINE", "0") && !offline("HF_OTHER", "1"));
}
