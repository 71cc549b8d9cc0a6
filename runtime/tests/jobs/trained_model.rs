//! What is done with a model after its training: text, conversations, adapters beside their base model.

use crate::support::Project;
use phalanx::api::generate::with_generator;
use phalanx::api::sampling::Sampling;
use phalanx::data::tokenizer::Tokenizer;

/// A project with a base model in `base/model`, and adapters for it in `adapter` and, merged into it, `merged`. They are trained with
/// these further keys.
fn with_adapter(more: &str) -> Project {
    let p = Project::new();
    p.train(&["--max_steps", "10", "--output_dir", "base"]).succeeds();
    let yaml = crate::support::YAML.split_once("datasets:").unwrap().1;
    let keys = "adapter: lora\nlora_r: 4\nlora_target_modules: [q_proj, v_proj, down_proj]\n";
    p.write("lora.yaml", &format!("base_model: DIR/base/model\n{keys}{more}datasets:{yaml}"));
    p.run(&["train", "lora.yaml", "--max_steps", "10", "--output_dir", "tuned", "--learning_rate", "0.1"]).succeeds();
    p.run(&["export", "tuned", "adapter"]).succeeds();
    p.run(&["export", "tuned", "merged", "--merge"]).succeeds();
    p
}

#[test]
fn adapter_beside_its_base_model_continues_a_text_as_the_merged_model_does() {
    for keys in ["", "peft_use_dora: true\n"] {
        let p = with_adapter(keys);
        let generate =
            |args: &[&str]| p.run(&[&["generate"], args, &["--prompt", "The", "--max-new-tokens", "40"]].concat());

        let adapted = generate(&["adapter"]).succeeds().stdout;

        assert_eq!(adapted, generate(&["merged"]).succeeds().stdout, "{keys}");
        assert_ne!(adapted, generate(&["base/model"]).succeeds().stdout, "{keys}");
        assert_eq!(adapted, generate(&["adapter", "--base_model", "base/model"]).succeeds().stdout, "{keys}");
        generate(&["adapter", "--base_model", "nowhere"]).refuses(&["nowhere", "--base_model"]);
        generate(&["merged", "--base_model", "base/model"]).refuses(&["no adapter"]);
    }
}

#[test]
fn weights_stored_in_bf16_have_the_logits_of_the_same_numbers_in_f32() {
    for tied in ["true", "false"] {
        let p = Project::new();
        p.train(&["--max_steps", "5", "--model.tie_word_embeddings", tied]).succeeds();
        p.run(&["export", "out/model", "half", "--dtype", "bf16"]).succeeds();
        p.run(&["export", "half", "wide", "--dtype", "f32"]).succeeds();
        let logits = |model: &str| {
            with_generator(&p.path(model), 64, Some(2), |generator| {
                let ids: Vec<u32> = (0..40).map(|i| i * 7 % 100).collect();
                // A prompt, and tokens one by one.
                let mut all = generator.all_logits(&ids[..32])?.to_vec();
                for end in 33..=ids.len() {
                    all.extend(generator.logits(&ids[..end])?);
                }
                Ok(all.into_iter().map(f32::to_bits).collect::<Vec<u32>>())
            })
            .unwrap()
        };

        let half = logits("half");

        assert!(half == logits("wide"), "tied: {tied}");
        assert!(half != logits("out/model"), "tied: {tied}");
    }
}

#[test]
fn run_continues_from_magnitudes_and_without_dora_the_adapter_is_refused() {
    let p = with_adapter("peft_use_dora: true\n");
    let first_loss = |run: &str, keys: &[&str]| {
        p.run(&[&["train", "lora.yaml", "--max_steps", "1", "--output_dir", run], keys].concat()).succeeds();
        f64::from_bits(p.metrics(run)[0].1)
    };

    let continued = first_loss("continued", &["--lora_model_dir", "adapter"]);
    let of_merged = first_loss("of_merged", &["--base_model", "merged"]);
    let anew = first_loss("anew", &[]);

    assert!((continued - of_merged).abs() < 1e-5, "{continued} {of_merged}");
    assert!((continued - anew).abs() > 1e-2, "{continued} {anew}");
    let other = ["train", "lora.yaml", "--lora_model_dir", "adapter", "--peft_use_dora", "false"];
    p.run(&other).refuses(&["set `peft_use_dora: true`"]);
}

#[test]
fn continuation_ends_at_a_stop_text_and_follows_its_settings() {
    let p = Project::new();
    p.train(&["--max_steps", "60"]).succeeds();
    let generate = |args: &[&str]| {
        p.run(&[&["generate", "out/model", "--prompt", "The 1", "--max-new-tokens", "48"], args].concat())
    };

    let whole = generate(&[]).succeeds().stdout;

    let (before, _) = whole["The 1".len()..].split_at(7);
    let stop = &whole["The 1".len() + 7..][..3];
    let first = before.len() - before.find(stop).map_or(0, |at| before.len() - at);
    assert_eq!(generate(&["--stop", stop]).succeeds().stdout, format!("The 1{}\n", &before[..first]));
    assert_ne!(generate(&["--repetition_penalty", "1.5"]).succeeds().stdout, whole);
    generate(&["--top_p", "1.5"]).refuses(&["top_p is 1.5", "at most 1"]);
    generate(&["--repetition_penalty", "0"]).refuses(&["repetition_penalty is 0"]);
}

#[test]
fn one_question_has_one_answer_rendered_with_the_chat_template() {
    let p = Project::new();
    p.train(&["--max_steps", "10", "--model.max_position_embeddings", "256"]).succeeds();
    let question = ["--prompt", "Hello", "--system", "Be brief.", "--max_new_tokens", "9"];
    let rendered =
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n";

    let answer = p.run(&[&["chat", "out/model"], &question[..]].concat()).succeeds().stdout;

    let expected = with_generator(&p.path("out/model"), 256, Some(2), |generator| {
        let ids = generator.tokenizer().encode(rendered)?;
        let all = generator.generate(ids.clone(), 9, Sampling::GREEDY, |_| true)?;
        Ok(generator.tokenizer().decode(&all[ids.len()..], true)?)
    });
    assert_eq!(answer, format!("{}\n", expected.unwrap()));
    let named = [&["chat", "out/model", "--chat_template", "chatml"], &question[..]].concat();
    assert_eq!(p.run(&named).succeeds().stdout, answer);
    let unknown = [&["chat", "out/model", "--chat_template", "nowhere.jinja"], &question[..]].concat();
    p.run(&unknown).refuses(&["nowhere.jinja", "chatml"]);
    let long = "x".repeat(400);
    p.run(&["chat", "out/model", "--prompt", &long]).refuses(&["at most 256"]);
}

#[test]
fn tokens_that_end_a_turn_in_training_end_answers_of_the_model_and_of_an_adapter() {
    let p = Project::new();
    let turn = r#"{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho."}]}"#;
    p.write("chat.jsonl", &[turn; 16].join("\n"));
    let yaml =
        crate::support::YAML.replace("text.txt", "chat.jsonl").replace("type: completion", "type: chat_template");
    let (model, rest) = yaml.split_once("datasets:").unwrap();
    p.write("chat.yaml", &format!("{model}chat_template: chatml\neot_tokens: ['<|pad|>']\ndatasets:{rest}"));
    p.run(&["train", "chat.yaml", "--max_steps", "1"]).succeeds();
    p.train(&["--max_steps", "1", "--output_dir", "base"]).succeeds();
    let keys = "adapter: lora\nlora_r: 4\nlora_target_modules: [q_proj]\nchat_template: chatml\n";
    p.write("lora.yaml", &format!("base_model: DIR/base/model\n{keys}datasets:{rest}"));
    p.run(&["train", "lora.yaml", "--max_steps", "1", "--output_dir", "tuned"]).succeeds();
    p.run(&["export", "tuned", "merged", "--merge"]).succeeds();
    let tokenizer = Tokenizer::from_dir(&p.path("out/model")).unwrap();
    let [eos, end, pad] = ["<|eos|>", "<|im_end|>", "<|pad|>"].map(|text| tokenizer.token_id(text).unwrap());

    let ends = |dir: &str| {
        let text = std::fs::read_to_string(p.path(dir).join("generation_config.json")).unwrap();
        serde_json::from_str::<serde_json::Value>(&text).unwrap()["eos_token_id"].clone()
    };

    assert_eq!(ends("out/model"), serde_json::json!([eos, pad, end]));
    for dir in ["tuned/model", "merged"] {
        assert_eq!(ends(dir), serde_json::json!([eos, end]), "{dir}");
        assert_eq!(Tokenizer::from_dir(&p.path(dir)).unwrap().stop_ids(), [eos, end], "{dir}");
    }
    assert!(!p.path("base/model/generation_config.json").exists(), "a model of texts has no turns");
}

#[test]
fn prompt_of_several_chunks_has_the_logits_of_its_tokens_one_by_one() {
    const N: usize = 1200;
    let p = Project::new();
    p.train(&["--max_steps", "2", "--model.max_position_embeddings", "1300"]).succeeds();
    let ids: Vec<u32> = (0..N as u32).map(|i| i * i % 251).collect();

    let (whole, single) = with_generator(&p.path("out/model"), N, Some(2), |generator| {
        let v = generator.vocab_size();
        let whole = generator.all_logits(&ids)?.to_vec();
        generator.logits(&ids[..500])?;
        let mut single = Vec::new();
        for n in 501..=N {
            single.push((n - 1, generator.logits(&ids[..n])?.to_vec()));
        }
        Ok((whole.chunks(v).map(<[f32]>::to_vec).collect::<Vec<_>>(), single))
    })
    .unwrap();

    assert_eq!(whole.len(), N);
    for (position, logits) in single {
        for (a, b) in logits.iter().zip(&whole[position]) {
            assert!((a - b).abs() < 2e-5 * (1.0 + b.abs()), "{a} {b} at {position}");
        }
    }
}

#[test]
fn model_is_exported_in_the_wanted_type_and_an_adapter_carries_its_tokenizer() {
    let p = with_adapter("");
    let dtype = |dir: &str| {
        let config = std::fs::read_to_string(p.path(dir).join("config.json")).unwrap();
        serde_json::from_str::<serde_json::Value>(&config).unwrap()["torch_dtype"].as_str().unwrap().to_owned()
    };
    let bytes = |dir: &str| std::fs::metadata(p.path(dir).join("model.safetensors")).unwrap().len();

    p.run(&["export", "base/model", "half", "--dtype", "bf16"]).succeeds();
    p.run(&["export", "half", "again"]).succeeds();
    p.run(&["export", "tuned", "merged-half", "--merge", "--dtype", "f16"]).succeeds();
    p.run(&["export", "adapter", "whole", "--merge"]).succeeds();

    assert_eq!([dtype("base/model"), dtype("half"), dtype("again")], ["float32", "bfloat16", "bfloat16"]);
    assert_eq!(dtype("merged-half"), "float16");
    assert!(bytes("half") < bytes("base/model") * 6 / 10);
    // Merged from the checkpoint, or from the adapter that was exported from it.
    let weights = |dir: &str| std::fs::read(p.path(dir).join("model.safetensors")).unwrap();
    assert!(weights("whole") == weights("merged"));
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        assert!(p.path("adapter").join(file).is_file(), "{file}");
    }
    p.run(&["export", "adapter", "x"]).refuses(&["--merge"]);
    p.run(&["export", "base/model", "x", "--merge"]).refuses(&["whole model"]);
}

#[test]
fn file_of_llama_cpp_is_written_for_families_that_it_can_express() {
    let p = with_adapter("");

    p.run(&["export", "base/model", "m.gguf", "--gguf", "q8_0"]).succeeds();
    p.run(&["export", "adapter", "a.gguf", "--gguf", "f16", "--merge"]).succeeds();

    let file = std::fs::read(p.path("m.gguf")).unwrap();
    assert_eq!(&file[..8], b"GGUF\x03\0\0\0");
    assert!(std::fs::read(p.path("a.gguf")).unwrap().len() > file.len());
    // As llama.cpp spells it; the file names the mixture by its number.
    p.run(&["export", "base/model", "k.gguf", "--gguf", "Q4_K_M"]).succeeds();
    let key = [&b"general.file_type"[..], &4u32.to_le_bytes(), &15u32.to_le_bytes()].concat();
    let file = std::fs::read(p.path("k.gguf")).unwrap();
    assert!(file.windows(key.len()).any(|window| window == key));
    p.run(&["export", "base/model", "s.gguf", "--gguf", "q4_k_s"]).refuses(&["q4_k_s", "q4_k_m"]);
    p.run(&["export", "base/model", "m.gguf", "--gguf", "f16"]).refuses(&["m.gguf", "already exists"]);
    p.run(&["export", "base/model", "m.bin", "--gguf", "f16"]).refuses(&["m.bin must end in .gguf"]);
    p.run(&["export", "base", "n.gguf", "--gguf", "f16"]).refuses(&["model directory", "checkpoint"]);
    p.train(&["--max_steps", "2", "--output_dir", "phi", "--model.model_type", "phi3"]).succeeds();
    p.run(&["export", "phi/model", "p.gguf", "--gguf", "f16"]).refuses(&["phi3", "llama, mistral, qwen2, qwen3"]);
}
