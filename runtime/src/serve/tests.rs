use super::answer::{Events, Gathered, Header, Shape};
use super::refusal::Refusal;
use super::request::{Offer, Prompt, Request};
use super::worker::{Part, Piece, Token};
use crate::api::sampling::Sampling;
use crate::data::exact_json;
use serde_json::{Value, json};

fn offer() -> Offer {
    let sampling = Sampling { temperature: 0.5, top_p: 0.9, ..Sampling::GREEDY };
    Offer { name: "m".into(), sampling, max_len: 64 }
}

fn completion(body: &Value) -> Result<Request, Refusal> {
    Request::completion(body.to_string().as_bytes(), &offer())
}

fn chat(body: &Value) -> Result<Request, Refusal> {
    Request::chat(body.to_string().as_bytes(), &offer())
}

/// The field that a refusal names, and its message.
fn at_fault(refused: Result<Request, Refusal>) -> (String, String) {
    let json = refused.unwrap_err().json();
    let text = |key: &str| json["error"][key].as_str().unwrap_or_default().to_owned();
    assert_eq!(text("type"), "invalid_request_error");
    (text("param"), text("message"))
}

#[test]
fn prompts_are_texts_or_token_ids_one_or_many() {
    let prompts = |prompt: Value| completion(&json!({"prompt": prompt})).unwrap().prompts;
    let text = |text: &str| Prompt::Text(text.into());

    assert_eq!(prompts(json!("a")), [text("a")]);
    assert_eq!(prompts(json!(["a", "b"])), [text("a"), text("b")]);
    assert_eq!(prompts(json!([1, 2])), [Prompt::Ids(vec![1, 2])]);
    assert_eq!(prompts(json!([[1, 2], [3]])), [Prompt::Ids(vec![1, 2]), Prompt::Ids(vec![3])]);
}

#[test]
fn absent_and_null_settings_are_those_of_the_model() {
    let bare = completion(&json!({"prompt": "a", "temperature": null, "stop": null})).unwrap();
    let set = completion(&json!({"prompt": "a", "temperature": 0, "top_k": -1, "seed": 7, "max_tokens": 3})).unwrap();

    let sampling = bare.completion.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, bare.completion.max_new), (0.5, 0.9, 16));
    let Sampling { temperature, top_k, seed, .. } = set.completion.sampling;
    assert_eq!((temperature, top_k, seed, set.completion.max_new), (0.0, 0, 7, 3));
    let seed = |request: &Request| request.completion.sampling.seed;
    assert_ne!(seed(&bare), seed(&completion(&json!({"prompt": "a"})).unwrap()), "texts differ without a seed");
    let open = chat(&json!({"messages": [{"role": "user", "content": "a"}]})).unwrap();
    assert_eq!((open.has_limit, open.completion.max_new), (false, 64));
}

#[test]
fn refusal_names_the_field_at_fault() {
    let with = |key: &str, value: Value| {
        let mut body = json!({"prompt": "a"});
        body[key] = value;
        completion(&body)
    };
    let many: Vec<&str> = vec!["a"; 300];
    for (key, value) in [
        ("prompt", json!([])),
        ("prompt", json!([[]])),
        ("prompt", json!([1, "a"])),
        ("prompt", json!([-1])),
        ("prompt", json!([1e10])),
        ("prompt", json!(many)),
        ("max_tokens", json!(-1)),
        ("max_tokens", json!("3")),
        ("max_tokens", json!(0)),
        ("temperature", json!(-0.1)),
        ("temperature", json!("hot")),
        ("top_p", json!(0)),
        ("top_k", json!(1.5)),
        ("repetition_penalty", json!(0)),
        ("seed", json!("x")),
        ("n", json!(0)),
        ("n", json!(17)),
        ("best_of", json!(2)),
        ("logprobs", json!(21)),
        ("echo", json!("yes")),
        ("stop", json!([""])),
        ("stop", json!([1])),
        ("stop", json!("x".repeat(2000))),
        ("suffix", json!("b")),
        ("presence_penalty", json!(0.5)),
        ("logit_bias", json!({"1": 2})),
        ("stream_options", json!({})),
        ("temprature", json!(1)),
    ] {
        let (param, message) = at_fault(with(key, value.clone()));
        assert!(param == key && message.contains(key), "{key} {value}: {param}: {message}");
    }
    assert_eq!(at_fault(completion(&json!({}))).0, "prompt");
    assert_eq!(completion(&json!({"prompt": "a", "model": "other"})).unwrap_err().status, 404);
    for nothing in
        [json!({"presence_penalty": 0.0}), json!({"logit_bias": {}}), json!({"suffix": ""}), json!({"best_of": 1})]
    {
        let mut body = json!({"prompt": "a", "model": "m", "user": "u"});
        body.as_object_mut().unwrap().extend(nothing.as_object().unwrap().clone());
        assert!(completion(&body).is_ok(), "{nothing}");
    }
}

#[test]
fn messages_are_checked_and_parts_of_text_reach_the_template() {
    let messages = |messages: Value| chat(&json!({"messages": messages}));
    let hello = json!({"role": "user", "content": "Hello"});
    for (param, found) in [
        ("messages", messages(json!([]))),
        ("messages", messages(json!("Hello"))),
        ("messages", chat(&json!({}))),
        ("messages[0]", messages(json!(["Hello"]))),
        ("messages[1].role", messages(json!([hello, {"content": "Hello"}]))),
        ("messages[0].content", messages(json!([{"role": "user"}]))),
        (
            "messages[0].content[1]",
            messages(json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}])),
        ),
        ("tools[0]", chat(&json!({"messages": [hello], "tools": [{}]}))),
        ("tool_choice", chat(&json!({"messages": [hello], "tool_choice": "required"}))),
        (
            "tool_choice",
            chat(&json!({"messages": [hello], "tool_choice": {"type": "function", "function": {"name": "f"}}})),
        ),
        ("functions", chat(&json!({"messages": [hello], "functions": [{"name": "f"}]}))),
        (
            "messages[0].tool_calls[0]",
            messages(json!([{"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]}])),
        ),
        ("top_logprobs", chat(&json!({"messages": [hello], "top_logprobs": 2}))),
        ("response_format", chat(&json!({"messages": [hello], "response_format": {"type": "json_object"}}))),
        ("chat_template_kwargs", chat(&json!({"messages": [hello], "chat_template_kwargs": 1}))),
    ] {
        assert_eq!(at_fault(found).0, param);
    }
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
    let request = messages(json!([{"role": "user", "content": parts, "name": null}])).unwrap();
    let Prompt::Chat(conversation) = &request.prompts[0] else { panic!("{request:?}") };
    assert_eq!(conversation.messages[0].0, *json!({"role": "user", "content": parts}).as_object().unwrap());
}

#[test]
fn conversation_with_calls_and_tools_is_taken_as_clients_send_it_back() {
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]);
    let call = json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
    let messages = json!([
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": null, "refusal": null, "annotations": [], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "3"}]},
        {"role": "assistant", "content": "3.", "tool_calls": []},
    ]);
    for (choice, needs_tools) in [(Value::Null, true), (json!("auto"), true), (json!("none"), false)] {
        let request = chat(&json!({"messages": messages, "tools": tools, "tool_choice": choice})).unwrap();

        assert_eq!(request.needs_tools, needs_tools);
        let Prompt::Chat(conversation) = &request.prompts[0] else { panic!("{request:?}") };
        assert_eq!(conversation.tools.as_ref(), Some(&tools));
        let message = |i: usize| Value::from(conversation.messages[i].0.clone());
        assert_eq!(message(1), json!({"role": "assistant", "content": null, "tool_calls": [call]}));
        assert_eq!(message(2), messages[2]);
        assert_eq!(message(3), json!({"role": "assistant", "content": "3."}));
    }
    let without = chat(&json!({"messages": messages, "tools": []})).unwrap();
    assert!(matches!(&without.prompts[0], Prompt::Chat(conversation) if conversation.tools.is_none()));
}

#[test]
fn long_numbers_of_a_request_stay_exact() {
    const LONG: &str = "123456789012345678901234567890";
    let of = |keys: &str| {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "a", "n": {LONG}}}], {keys}}}"#);
        Request::chat(body.as_bytes(), &offer())
    };

    let request = of(&format!(r#""temperature": -0, "chat_template_kwargs": {{"n": {LONG}}}"#)).unwrap();

    let Prompt::Chat(conversation) = &request.prompts[0] else { panic!("{request:?}") };
    for kept in [&conversation.messages[0].0["n"], &conversation.variables["n"]] {
        assert_eq!(exact_json::number(kept), Some(LONG));
    }
    assert_eq!(request.completion.sampling.temperature, 0.0);
    for (field, value) in [("seed", LONG), ("chat_template_kwargs", LONG), ("temperature", "NaN")] {
        let (param, message) = at_fault(of(&format!(r#""{field}": {value}"#)));
        assert!(param == field && message.contains(&format!("is {value},")), "{message}");
    }
}

fn header(shape: Shape) -> Header {
    Header { shape, id: "x".into(), created: 1, model: "m".into() }
}

fn token(bytes: &[u8], offset: usize, logprob: Option<f32>) -> Token {
    let piece = |bytes: &[u8]| Piece { bytes: bytes.to_vec() };
    let top =
        logprob.map_or(Vec::new(), |_| vec![(piece(b"best"), -0.5), (piece(&[0xff]), -1.0), (piece(b"best"), -2.0)]);
    Token { piece: piece(bytes), offset, logprob, top }
}

/// The parts of an answer of two tokens, after an echoed one.
fn parts() -> Vec<Part> {
    vec![
        Part::Accepted { prompt_tokens: 1 },
        Part::Text { choice: 0, text: "ü".into(), tokens: vec![token("ü".as_bytes(), 0, None)] },
        Part::Text { choice: 0, text: String::new(), tokens: vec![token(&[0xc3], 1, Some(-3.0))] },
        Part::Text { choice: 0, text: "é".into(), tokens: vec![token(&[0xa9], 1, Some(-0.5))] },
        Part::Finished { choice: 0, is_at_limit: true },
        Part::Done { completion_tokens: 2 },
    ]
}

#[test]
fn likelihoods_of_tokens_without_text_of_their_own_stay_apart() {
    let request = completion(&json!({"prompt": "ü", "logprobs": 3, "echo": true})).unwrap();
    let mut gathered = Gathered::new(header(Shape::Completion), &request);

    let answer = parts().into_iter().find_map(|part| gathered.take(part)).unwrap().unwrap();

    let choice = &answer["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("üé"), &json!("length")));
    let logprobs = &choice["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["ü", "bytes:\\xc3", "bytes:\\xa9"]));
    assert_eq!(logprobs["token_logprobs"], json!([null, -3.0, -0.5]));
    assert_eq!(logprobs["top_logprobs"][0], Value::Null);
    assert_eq!(logprobs["top_logprobs"][1], json!({"best": -0.5, "bytes:\\xff": -1.0, "bytes:\\xc3": -3.0}));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 1]));
    assert_eq!(answer["usage"], json!({"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}));
}

#[test]
fn stream_has_the_text_and_likelihoods_of_the_whole_answer() {
    let body = json!({"messages": [{"role": "user", "content": "ü"}], "logprobs": true, "top_logprobs": 3, "stream": true,
        "stream_options": {"include_usage": true}});
    let request = chat(&body).unwrap();
    let (mut events, mut gathered) =
        (Events::new(header(Shape::Chat), &request), Gathered::new(header(Shape::Chat), &request));

    let text: String = parts().into_iter().map(|part| events.of(part)).collect();
    let whole = parts().into_iter().find_map(|part| gathered.take(part)).unwrap().unwrap();

    let mut data: Vec<&str> = text.split_terminator("\n\n").map(|line| line.strip_prefix("data: ").unwrap()).collect();
    assert_eq!(data.pop(), Some("[DONE]"));
    let chunks: Vec<Value> = data.iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
    assert_eq!(chunks.last().unwrap()["usage"], whole["usage"]);
    let deltas: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(deltas, whole["choices"][0]["message"]["content"]);
    let likelihoods: Vec<Value> = chunks
        .iter()
        .filter_map(|chunk| chunk["choices"][0]["logprobs"]["content"].as_array().cloned())
        .flatten()
        .collect();
    assert_eq!(Value::from(likelihoods), whole["choices"][0]["logprobs"]["content"]);
    assert_eq!(chunks[chunks.len() - 2]["choices"][0]["finish_reason"], "length");
}
