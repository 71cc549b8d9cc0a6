//! Bodies of requests to `phalanx serve`.

use super::Target;
use phalanx::fuzzing::served;
use serde_json::json;

pub(super) const TARGET: Target = Target { name: "served", run, seeds };

/// A request stays within the limits, or is refused with a sentence.
fn run(bytes: &[u8]) {
    for read in served(bytes) {
        match read {
            Ok([n_prompts, n, n_stops]) => {
                assert!((1..=256).contains(&n_prompts) && (1..=16).contains(&n) && n_stops <= 16);
            }
            Err(answer) => {
                let message = answer["error"]["message"].as_str().expect("a refusal has a message");
                // The longest value that is shown has 60 characters.
                assert!(!message.is_empty() && message.len() < 1000, "{message}");
            }
        }
    }
}

fn seeds() -> Vec<Vec<u8>> {
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]);
    [
        json!({"prompt": "Once", "max_tokens": 3, "stop": ["a", "b"], "temperature": 0.5, "top_p": 0.9, "seed": 7, "n": 2}),
        json!({"prompt": [[1, 2], [3]], "max_tokens": 1, "logprobs": 1, "echo": true, "temperature": 0, "model": "m"}),
        json!({"prompt": ["a", "b"], "stream": true, "stream_options": {"include_usage": true}, "top_k": -1}),
        json!({"messages": messages, "max_completion_tokens": 3, "logprobs": true, "top_logprobs": 2}),
        json!({"messages": messages, "chat_template_kwargs": {"enable_thinking": false}, "response_format": {"type": "text"}}),
        json!({"input": ["a", "b"], "use_activation": false, "add_special_tokens": false}),
        json!({"messages": messages, "add_generation_prompt": true, "activation": false}),
    ]
    .map(|body| body.to_string().into_bytes())
    .to_vec()
}
