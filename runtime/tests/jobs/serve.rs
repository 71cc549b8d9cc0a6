//! `phalanx serve`, driven over HTTP.

use crate::support::Project;
use crate::support::server::{JSON, PATIENCE, Server, answer_of};
use phalanx::api::completion::likelihoods;
use phalanx::api::generate::with_generator;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// A project with a model in `out/model`.
fn trained(positions: &str) -> Project {
    let p = Project::new();
    p.train(&["--max_steps", "30", "--model.max_position_embeddings", positions]).succeeds();
    p
}

#[test]
fn completion_is_the_text_of_generate_and_its_likelihoods_are_those_of_the_model() {
    let p = trained("64");
    let server = Server::start(&p, &["out/model", "--name", "tiny"]);
    let greedy = json!({"model": "tiny", "prompt": "The 1", "max_tokens": 20, "temperature": 0});

    let answer = server.completed(&greedy);

    let generated = p.run(&["generate", "out/model", "--prompt", "The 1", "--max-new-tokens", "20"]).succeeds().stdout;
    let text = answer["choices"][0]["text"].as_str().unwrap();
    assert_eq!(format!("The 1{text}\n"), generated);
    let ended = answer["choices"][0]["finish_reason"].as_str().unwrap();
    assert!(["stop", "length"].contains(&ended), "{answer}");
    let usage = &answer["usage"];
    assert_eq!(usage["prompt_tokens"], 6, "BOS and five bytes");
    assert_eq!(usage["total_tokens"], 6 + usage["completion_tokens"].as_u64().unwrap());

    // As lm-eval-harness asks for the likelihood of a text: its ids, echoed, and one token more.
    let ids: Vec<u32> = [256].into_iter().chain("The 12th hoplite".bytes().map(u32::from)).collect();
    let scored =
        json!({"prompt": [ids, ids[..4]], "max_tokens": 1, "temperature": 0, "logprobs": 3, "echo": true, "seed": 1});
    let answer = server.completed(&scored);
    let expected =
        with_generator(&p.path("out/model"), 64, Some(2), |generator| likelihoods(generator, &ids, 3)).unwrap();
    let logprobs = &answer["choices"][0]["logprobs"];
    let found: Vec<Option<f64>> = logprobs["token_logprobs"].as_array().unwrap().iter().map(Value::as_f64).collect();
    assert_eq!((found.len(), found[0]), (ids.len() + 1, None));
    for (at, (found, expected)) in found.iter().zip(&expected).enumerate().skip(1) {
        let expected = expected.as_ref().unwrap();
        assert!((found.unwrap() - f64::from(expected.token.logprob)).abs() < 1e-5, "{at}");
        let best = logprobs["top_logprobs"][at].as_object().unwrap().values().map(|x| x.as_f64().unwrap());
        assert!((best.fold(f64::MIN, f64::max) - f64::from(expected.top[0].logprob)).abs() < 1e-5, "{at}");
    }
    assert_eq!(answer["choices"][1]["logprobs"]["token_logprobs"].as_array().unwrap().len(), 4 + 1);
    assert_eq!(answer["choices"][1]["logprobs"]["tokens"][3], "e");
}

#[test]
fn likelihoods_of_reference_models_are_those_of_transformers() {
    let p = Project::new();
    let reference = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/reference"));
    for name in ["tiny-llama3", "tiny-gpt2", "tiny-qwen3", "tiny-phi3"] {
        let numbers = std::fs::read_to_string(reference.join(format!("numbers/{name}.json"))).unwrap();
        let numbers: Value = serde_json::from_str(&numbers).unwrap();
        let server = Server::start(&p, &[reference.join("models").join(name).to_str().unwrap()]);
        let prompt = &numbers["logits"]["input_ids"];

        let answer = server.completed(&json!({"prompt": prompt, "max_tokens": 1, "temperature": 0, "logprobs": 20}));

        let logits: Vec<f64> =
            numbers["logits"]["last_position"].as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect();
        let total = logits.iter().map(|x| x.exp()).sum::<f64>().ln();
        let mut expected: Vec<f64> = logits.iter().map(|x| x - total).collect();
        expected.sort_by(|a, b| b.total_cmp(a));
        let logprobs = &answer["choices"][0]["logprobs"];
        let mut found: Vec<f64> =
            logprobs["top_logprobs"][0].as_object().unwrap().values().map(|x| x.as_f64().unwrap()).collect();
        found.sort_by(|a, b| b.total_cmp(a));
        assert_eq!(found.len(), 20, "{name}");
        for (found, expected) in found.iter().zip(&expected) {
            assert!((found - expected).abs() < 1e-5, "{name}: {found} {expected}");
        }
        assert!((logprobs["token_logprobs"][0].as_f64().unwrap() - expected[0]).abs() < 1e-5, "{name}");
    }
}

#[test]
fn chat_is_that_of_the_command_and_a_stream_has_the_same_text() {
    let p = trained("256");
    let server = Server::start(&p, &["out/model"]);
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]);
    let body =
        |stream: bool| json!({"messages": messages, "temperature": 0, "max_completion_tokens": 12, "stream": stream});

    let (status, answer) = server.post("/v1/chat/completions", &body(false));
    let (streamed, text) = server.ask("POST", "/v1/chat/completions", &[JSON], &body(true).to_string());

    assert_eq!((status, streamed), (200, 200), "{answer}");
    let spoken = p.run(&["chat", "out/model", "--prompt", "Hello", "--system", "Be brief.", "--max-new-tokens", "12"]);
    let content = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(format!("{content}\n"), spoken.succeeds().stdout);
    assert_eq!(answer["object"], "chat.completion");
    let mut events: Vec<&str> =
        text.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap()).collect();
    assert_eq!(events.pop(), Some("[DONE]"));
    let chunks = events.iter().map(|event| serde_json::from_str::<Value>(event).unwrap());
    let deltas: String =
        chunks.filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str().map(str::to_owned)).collect();
    assert_eq!(deltas, content);
}

#[test]
fn sampled_texts_follow_their_seed_and_end_at_stop_texts() {
    let p = trained("64");
    let server = Server::start(&p, &["out/model"]);
    let sampled = |seed: u64| {
        let body =
            json!({"prompt": "The", "max_tokens": 24, "temperature": 1.5, "seed": seed, "n": 2, "ignore_eos": true});
        let answer = server.completed(&body);
        [0, 1].map(|i| answer["choices"][i]["text"].as_str().unwrap().to_owned())
    };

    let [first, second] = sampled(3);

    assert_eq!(sampled(3), [first.clone(), second.clone()]);
    assert_ne!(first, second);
    assert_ne!(sampled(9)[0], first);
    let greedy = |stop: Value| {
        let answer = server.completed(&json!({"prompt": "The 1", "max_tokens": 24, "temperature": 0, "stop": stop}));
        (answer["choices"][0]["text"].as_str().unwrap().to_owned(), answer["choices"][0]["finish_reason"].clone())
    };
    let (whole, _) = greedy(Value::Null);
    let stop = &whole[5..8];
    let (cut, reason) = greedy(json!([stop, "never"]));
    assert_eq!((cut.as_str(), reason), (&whole[..whole.find(stop).unwrap()], json!("stop")));
}

/// Texts, offsets and the whole text of the tokens of a completion.
fn walked(choice: &Value) -> (Vec<String>, Vec<usize>, String) {
    let list = |key: &str| choice["logprobs"][key].as_array().unwrap().clone();
    let tokens = list("tokens").iter().map(|token| token.as_str().unwrap().to_owned()).collect();
    let offsets = list("text_offset").iter().map(|offset| offset.as_u64().unwrap() as usize).collect();
    (tokens, offsets, choice["text"].as_str().unwrap().to_owned())
}

/// Panics unless each token with a text is where its offset says. A tokenizer may strip the blank that its first token begins with.
fn assert_in_place((tokens, offsets, text): &(Vec<String>, Vec<usize>, String)) {
    let chars: Vec<char> = text.chars().collect();
    for (token, offset) in tokens.iter().zip(offsets) {
        let begins = *offset == 0 && !text.starts_with(' ');
        let token = if begins { token.trim_start_matches(' ') } else { token };
        let is_part = token.starts_with("bytes:") || token.starts_with('<') || !text.contains(token);
        let there: String = chars[*offset..].iter().take(token.chars().count()).collect();
        assert!(is_part || there == token, "{token:?} is not at {offset} of {text:?}: {there:?}");
    }
    assert!(offsets.is_sorted(), "{offsets:?}");
}

#[test]
fn offsets_of_tokens_are_positions_in_the_text_also_in_a_stream_and_before_a_stop_text() {
    let p = trained("64");
    let reference = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/reference/models"));
    for model in [p.path("out/model"), reference.join("tiny-llama2"), reference.join("tiny-llama3")] {
        let server = Server::start(&p, &[model.to_str().unwrap()]);
        let prompt = "Once upon a time, é 語 there was";
        let body = |more: Value| {
            let mut body =
                json!({"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 1, "ignore_eos": true});
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            body
        };

        let echoed = walked(&server.completed(&body(json!({"echo": true})))["choices"][0]);
        let whole = walked(&server.completed(&body(json!({})))["choices"][0]);
        let (_, streamed) = server.ask("POST", "/v1/completions", &[JSON], &body(json!({"stream": true})).to_string());

        assert!(echoed.2.starts_with(prompt), "{}", echoed.2);
        assert_in_place(&echoed);
        assert_in_place(&whole);
        let events = streamed.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap());
        let mut joined = (Vec::new(), Vec::new(), String::new());
        for event in events.filter(|event| *event != "[DONE]") {
            let choice = &serde_json::from_str::<Value>(event).unwrap()["choices"][0];
            joined.2 += choice["text"].as_str().unwrap();
            if choice["logprobs"].is_object() {
                let (tokens, offsets, _) = walked(choice);
                joined.0.extend(tokens);
                joined.1.extend(offsets);
            }
        }
        assert_eq!(joined, whole);
        // The tokens of a stop text are no part of the answer.
        let stop: String = whole.2.chars().skip(2).take(3).collect();
        let cut = walked(&server.completed(&body(json!({"stop": [stop]})))["choices"][0]);
        assert_in_place(&cut);
        assert!(cut.1.iter().all(|offset| *offset < cut.2.chars().count().max(1)), "{cut:?}");
    }
}

#[test]
fn silent_connections_of_strangers_keep_nobody_out() {
    let p = trained("64");
    std::fs::write(p.path("key.txt"), "a-key-of-some-length\n").unwrap();
    let server = Server::start(&p, &["out/model", "--api-key-file", "key.txt"]);
    let silent: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(&server.address).unwrap()).collect();
    // Answers of which nobody reads a byte.
    let unread = "GET /health HTTP/1.1\r\nhost: a\r\n\r\n".repeat(200);
    let unread: Vec<TcpStream> = (0..150)
        .map(|_| {
            let mut stream = TcpStream::connect(&server.address).unwrap();
            stream.set_nonblocking(true).unwrap();
            let _ = stream.write(unread.as_bytes());
            stream
        })
        .collect();

    let begun = Instant::now();
    let status = server.ask("GET", "/health", &["authorization: Bearer a-key-of-some-length"], "").0;

    assert_eq!((status, silent.len() + unread.len()), (200, 350));
    assert!(begun.elapsed() < Duration::from_secs(9), "waited {:?} for the places of strangers", begun.elapsed());
}

#[test]
fn model_is_found_by_the_name_that_clients_write_into_a_path() {
    let p = trained("64");
    let server = Server::start(&p, &["out/model"]);

    for path in ["/v1/models/out%2Fmodel", "/v1/models/out%2fmodel", "/v1/models/out/model"] {
        let (status, model) = server.get(path);
        assert_eq!((status, &model["id"]), (200, &json!("out/model")), "{path}");
    }
    assert_eq!(server.get("/v1/models/out%2Fother").0, 404);
    assert_eq!(server.ask("GET", "/health", &["Host: localhost", "Host: evil.example"], "").0, 403);
}

#[test]
fn bad_requests_have_a_status_and_name_their_field() {
    let p = trained("64");
    let server = Server::start(&p, &["out/model", "--name", "tiny"]);
    let refused = |status: u16, param: Value, found: (u16, Value)| {
        let error = &found.1["error"];
        assert!((found.0, &error["param"]) == (status, &param) && error["message"].is_string(), "{param}: {found:?}");
    };
    let completions = |body: Value| server.post("/v1/completions", &body);

    refused(400, json!("prompt"), completions(json!({"prompt": 1.5})));
    refused(400, json!("prompt"), completions(json!({"prompt": [1, 999]})));
    refused(400, json!("prompt"), completions(json!({"prompt": "x".repeat(70)})));
    refused(400, json!("prompt"), completions(json!({"prompt": "x", "max_tokens": 64})));
    refused(
        400,
        json!("prompt"),
        completions(json!({"prompt": vec!["x"; 256], "n": 16, "max_tokens": 60, "logprobs": 20})),
    );
    refused(400, json!("temperature"), completions(json!({"prompt": "x", "temperature": -1})));
    refused(404, json!("model"), completions(json!({"prompt": "x", "model": "other"})));
    refused(400, json!("messages"), server.post("/v1/chat/completions", &json!({"messages": []})));
    refused(404, Value::Null, server.get("/v1/nothing"));
    refused(405, Value::Null, server.get("/v1/completions"));
    let raw = |headers: &[&str], body: &str| {
        let (status, text) = server.ask("POST", "/v1/completions", headers, body);
        (status, serde_json::from_str(&text).unwrap())
    };
    refused(400, Value::Null, raw(&[JSON], "{"));
    refused(413, Value::Null, raw(&[JSON], &" ".repeat(3 << 20)));
    // A page of another site can send neither JSON nor the name of this machine.
    refused(415, Value::Null, raw(&["content-type: text/plain"], r#"{"prompt": "x"}"#));
    refused(403, Value::Null, raw(&["Host: evil.example", JSON], r#"{"prompt": "x"}"#));
    let (_, models) = server.get("/v1/models");
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["max_model_len"]), (&json!("tiny"), &json!(64)));
    assert_eq!(server.get("/v1/models/tiny").0, 200);
    assert_eq!(server.ask("HEAD", "/health", &[], ""), (200, String::new()));
    assert_eq!(completions(json!({"prompt": "x", "max_tokens": 1})).0, 200, "it goes on");
}

#[test]
fn server_that_others_can_reach_needs_a_key() {
    let p = trained("64");
    std::fs::write(p.path("key.txt"), "a-key-of-some-length\n").unwrap();
    std::fs::write(p.path("short.txt"), "short\n").unwrap();

    p.run(&["serve", "out/model", "--listen", "0.0.0.0:0"]).refuses(&["0.0.0.0:0", "--api-key-file"]);
    p.run(&["serve", "out/model", "--host", "0.0.0.0", "--port", "0"]).refuses(&["0.0.0.0:0", "--api-key-file"]);
    let both = p.run(&["serve", "out/model", "--host", "localhost", "--listen", "127.0.0.1:0"]);
    assert!(both.code == Some(2) && both.stderr.contains("'--host <ADDRESS>' cannot be used with"), "{both:?}");
    p.run(&["serve", "out/model", "--api-key-file", "short.txt"]).refuses(&["short.txt", "at least 16"]);
    p.run(&["serve", "nowhere"]).refuses(&["nowhere"]);
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    p.run(&["serve", "out/model", "--listen", &address]).refuses(&["cannot listen", &address]);
    let port = address.rsplit(':').next().unwrap();
    p.run(&["serve", "out/model", "--port", port]).refuses(&["cannot listen", &address]);

    let server = Server::start(&p, &["out/model", "--api-key-file", "key.txt"]);
    let status = |headers: &[&str]| server.ask("GET", "/v1/models", headers, "").0;
    assert_eq!(status(&[]), 401);
    assert_eq!(status(&["authorization: Bearer a-key-of-some-lengt"]), 401);
    assert_eq!(status(&["authorization: Bearer a-key-of-some-length"]), 200);
    assert_eq!(status(&["authorization: Bearer a-key-of-some-length", "Host: gpu.example"]), 200);
}

/// A request that takes far longer than a test waits.
fn endless() -> String {
    let prompts: Vec<&str> = vec!["The"; 128];
    json!({"prompt": prompts, "n": 16, "max_tokens": 900, "ignore_eos": true}).to_string()
}

#[test]
fn full_queue_refuses_further_requests_and_a_signal_ends_the_server() {
    let p = trained("1024");
    let mut server = Server::start(&p, &["out/model", "--queue", "1"]);
    let running = server.send("POST", "/v1/completions", &[JSON], &endless());
    // The first request may still be waiting.
    let mut waiting = Vec::new();
    let deadline = Instant::now() + PATIENCE;
    let refused = loop {
        let stream = server.send("POST", "/v1/completions", &[JSON], &endless());
        stream.set_read_timeout(Some(Duration::from_millis(500))).unwrap();
        let mut status = [0; 12];
        match (&stream).read_exact(&mut status) {
            Ok(()) => break String::from_utf8_lossy(&status).into_owned(),
            Err(_) => waiting.push(stream),
        }
        assert!(Instant::now() < deadline && waiting.len() < 4, "{} requests wait", waiting.len());
    };

    crate::support::job::signal(server.child.id(), libc::SIGINT);
    let ended = crate::support::job::until("the end", || server.child.try_wait().unwrap());

    assert_eq!(refused, "HTTP/1.1 429");
    assert!(ended.success(), "{ended}");
    assert_eq!(answer_of(running).0, 503);
    let mut rest = String::new();
    server.out.read_to_string(&mut rest).unwrap();
    assert_eq!(rest, "stopped\n");
}

#[test]
fn request_ends_when_its_client_has_gone() {
    let p = trained("1024");
    let server = Server::start(&p, &["out/model"]);
    let gone = server.send("POST", "/v1/completions", &[JSON], &endless());
    std::thread::sleep(Duration::from_millis(300));

    drop(gone);
    let answer = server.completed(&json!({"prompt": "The", "max_tokens": 2}));

    assert_eq!(answer["choices"].as_array().unwrap().len(), 1);
}
