//! Files with the arguments of Hugging Face's trainer: those of TRL's command line, of LLaMA-Factory, and of
//! `TrainingArguments` themselves. Keys that a file leaves out have that tool's defaults, not those of Phalanx.
//!
//! A file that asks for something that Phalanx does not do, or has a key that no such tool has, is refused with the line of the key.

use serde_yaml_ng::{Mapping, Value};

use super::axolotl::ADAFACTOR;
use super::convert::Then::{Do, Key, LeftOut, NoEffect, Only, Part};
use super::convert::{Converted, Rule, at, convert};
use super::hugging_face_defaults::{default_of, defaults};
use super::hugging_face_preference::{self as preference, Method, NO_REINFORCEMENT, PairsAt};
use super::{ReadFile, deepspeed, fsdp, hugging_face_data as data, shown};
use crate::config::yaml_1_1::{number, truth, whole};

/// Keys by which a file is known as one of this family.
const MARKS: [&str; 6] = [
    "model_name_or_path",
    "per_device_train_batch_size",
    "num_train_epochs",
    "lr_scheduler_type",
    "finetuning_type",
    "per_device_eval_batch_size",
];
/// Keys of LLaMA-Factory.
const LLAMA_FACTORY: [&str; 8] =
    ["stage", "finetuning_type", "template", "cutoff_len", "dataset", "dataset_dir", "lora_rank", "lora_target"];
/// Keys of TRL.
const TRL: [&str; 9] = [
    "dataset_name",
    "datasets",
    "use_peft",
    "max_length",
    "max_seq_length",
    "packing",
    "dataset_text_field",
    "assistant_only_loss",
    "completion_only_loss",
];

const LORA_BASICS: &str = "adapters have a rank, alpha, targets, dropout, rank-stabilised scale, DoRA and LoRA+ only";
const NO_OTHER_OPTIMIZER: &str =
    "there is no such optimizer; set `optim` to adamw_torch, adamw_8bit, sgd, lion or adafactor";
const TEXT_ONLY: &str = "only text is trained on";
const CROSS_ENTROPY: &str = "the loss is the cross-entropy of the data";
const NO_EXPERTS: &str = "models have no experts";

const RULES: &[Rule] = &[
    ("model_name_or_path", Key("base_model")),
    ("model_revision", Do(revision)),
    ("output_dir", Key("output_dir")),
    ("seed", Key("seed")),
    ("data_seed", Do(data_seed)),
    ("per_device_train_batch_size", Key("micro_batch_size")),
    ("gradient_accumulation_steps", Key("gradient_accumulation_steps")),
    ("num_train_epochs", Do(epochs)),
    ("max_steps", Do(max_steps)),
    ("learning_rate", Key("learning_rate")),
    ("lr_scheduler_type", Do(schedule)),
    ("lr_scheduler_kwargs.*", Part),
    ("lr_scheduler_kwargs", LeftOut("write its parameters as a section")),
    ("warmup_steps", Do(warmup_steps)),
    ("warmup_ratio", Do(warmup_ratio)),
    ("weight_decay", Key("weight_decay")),
    ("adam_beta1", Key("adam_beta1")),
    ("adam_beta2", Key("adam_beta2")),
    ("adam_epsilon", Key("adam_epsilon")),
    ("max_grad_norm", Do(max_grad_norm)),
    ("optim", Do(optimizer)),
    ("optim_args", LeftOut("the keys of `optimizer` set its hyperparameters")),
    ("optim_target_modules", LeftOut(NO_OTHER_OPTIMIZER)),
    ("label_smoothing_factor", LeftOut(CROSS_ENTROPY)),
    ("neftune_noise_alpha", LeftOut("no noise is added to embeddings")),
    ("bf16", Key("bf16")),
    ("fp16", Key("fp16")),
    ("pure_bf16", Do(pure_bf16)),
    ("fp8", Key("fp8")),
    ("gradient_checkpointing", Key("gradient_checkpointing")),
    ("disable_gradient_checkpointing", Part),
    ("logging_steps", Do(logging_steps)),
    ("save_steps", Do(save_steps)),
    ("save_strategy", Do(save_strategy)),
    ("save_total_limit", Key("save_total_limit")),
    ("eval_strategy", Do(eval_strategy)),
    ("evaluation_strategy", Do(eval_strategy)),
    ("eval_steps", Part),
    ("load_best_model_at_end", Key("load_best_model_at_end")),
    ("metric_for_best_model", Key("metric_for_best_model")),
    ("greater_is_better", Key("greater_is_better")),
    ("early_stopping_steps", Key("early_stopping_patience")),
    ("resume_from_checkpoint", Do(resume)),
    ("push_to_hub", Do(push_to_hub)),
    ("hub_model_id", Part),
    ("hub_private_repo", Part),
    ("hub_revision", Part),
    ("ignore_data_skip", LeftOut("a resumed run continues with the next samples")),
    ("use_cpu", Do(use_cpu)),
    ("no_cuda", Do(use_cpu)),
    ("train_sampling_strategy", Do(sampling)),
    ("disable_shuffling", Do(no_shuffling)),
    ("deepspeed", Part),
    ("fsdp", Part),
    ("freeze_language_model", LeftOut("set `trained_parameters` in the result")),
    ("loraplus_lr_embedding", Only("1e-6", LORA_BASICS)),
    ("use_asft_loss", LeftOut(CROSS_ENTROPY)),
    ("use_eaft_loss", LeftOut(CROSS_ENTROPY)),
    ("module_dropout", LeftOut(LORA_BASICS)),
    ("use_kt", LeftOut(NO_EXPERTS)),
    ("use_hyper_parallel", LeftOut("set the sizes of the axes, such as `dp_shard_size`, in the result")),
    ("hyper_parallel_args", LeftOut("set the sizes of the axes, such as `dp_shard_size`, in the result")),
    ("hyper_parallel_cp_size", Only("1", "set `context_parallel_size` in the result")),
    ("use_megatron_bridge", LeftOut("set `tensor_parallel_size` and `pipeline_parallel_size` in the result")),
    ("export_quantization_bit", LeftOut("trained models are exported unquantized")),
    ("fsdp_config.*", Part),
    ("fsdp_config", LeftOut("write its options as a section")),
    (
        "parallelism_config.*",
        LeftOut("set `dp_shard_size`, `tensor_parallel_size` and `context_parallel_size` in the result"),
    ),
    ("auto_find_batch_size", LeftOut("`phalanx plan` finds the batch that fits the memory")),
    ("env.*", LeftOut("set variables of the environment when starting the job")),
    // Adapters and quantized weights.
    ("use_peft", Part),
    ("finetuning_type", Part),
    ("adapter_name_or_path", Key("lora_model_dir")),
    ("lora_task_type", Do(task_type)),
    ("lora_target_parameters", LeftOut("name the layers in `lora_target_modules`")),
    ("pissa_init", LeftOut(LORA_BASICS)),
    ("create_new_adapter", LeftOut(LORA_BASICS)),
    ("load_in_4bit", Key("load_in_4bit")),
    ("load_in_8bit", Key("load_in_8bit")),
    ("quantization_bit", Do(quantization_bit)),
    ("quantization_type", Do(four_bits)),
    ("bnb_4bit_quant_type", Do(four_bits)),
    ("use_bnb_nested_quant", Do(double_quantization)),
    ("double_quantization", Do(double_quantization)),
    ("quantization_method", Do(quantization_method)),
    // Data.
    ("max_length", Do(max_length)),
    ("max_seq_length", Key("sequence_len")),
    ("cutoff_len", Key("sequence_len")),
    ("packing", Do(data::packing)),
    ("neat_packing", Key("sample_packing")),
    ("streaming", Key("streaming")),
    ("dataset_streaming", Key("streaming")),
    ("test_split_size", Key("val_set_size")),
    ("val_size", Key("val_set_size")),
    ("train_on_prompt", Key("train_on_inputs")),
    ("mask_history", LeftOut("all answers of a conversation are trained on")),
    ("truncation_mode", Only("keep_start", "the end of a long sample is cut off, not its beginning")),
    ("packing_strategy", Do(data::packing_strategy)),
    (
        "dataset_kwargs.skip_prepare_dataset",
        LeftOut("set `type: tokenized` for the entries of `datasets` in the result"),
    ),
    ("dataset_kwargs.*", Only("null", "samples are as the `type` of an entry of `datasets` says")),
    ("enable_thinking", Do(data::enable_thinking)),
    ("preserve_thinking", LeftOut("the chat template decides which thoughts are kept")),
    ("default_system", LeftOut("store the system text in the records")),
    ("split_special_tokens", LeftOut("special tokens in a text are read as those tokens")),
    ("template", Do(data::template)),
    ("chat_template_path", Do(data::chat_template)),
    ("eos_token", Do(data::eos_token)),
    ("add_tokens", Do(data::tokens)),
    ("add_special_tokens", Do(data::special_tokens)),
    ("new_special_tokens_config", LeftOut("name the tokens in `add_special_tokens`")),
    ("dataset", Part),
    ("eval_dataset", Part),
    ("dataset_dir", Part),
    ("max_samples", Part),
    ("dataset_name", Part),
    ("dataset_config", Part),
    ("dataset_train_split", Part),
    ("dataset_test_split", Part),
    ("dataset_text_field", Part),
    ("assistant_only_loss", Part),
    ("completion_only_loss", Part),
    ("datasets", Part),
    ("mix_strategy", Do(data::mix_strategy)),
    ("interleave_probs", LeftOut("set `weight` of the entries of `datasets` in the result")),
    ("tokenized_path", Key("dataset_prepared_path")),
    ("tool_format", LeftOut("calls of tools are written by the chat template")),
    ("loss_type", Part),
    // What only other kinds of training have.
    ("stage", Do(stage)),
    ("rope_scaling", LeftOut("the model is as its config.json says; change it there")),
    ("shift_attn", LeftOut("attention is as in the model's config.json")),
    ("mixture_of_depths", LeftOut("the model is as its config.json says")),
    ("train_from_scratch", Key("reinit_weights")),
    ("use_dft_loss", LeftOut(CROSS_ENTROPY)),
    ("use_mca", LeftOut("set `tensor_parallel_size` and `pipeline_parallel_size` in the result")),
    ("use_galore", LeftOut(NO_OTHER_OPTIMIZER)),
    ("use_apollo", LeftOut(NO_OTHER_OPTIMIZER)),
    ("use_badam", LeftOut(NO_OTHER_OPTIMIZER)),
    ("use_adam_mini", LeftOut(NO_OTHER_OPTIMIZER)),
    ("use_muon", LeftOut(NO_OTHER_OPTIMIZER)),
    ("use_llama_pro", LeftOut("blocks cannot be added to a model")),
    ("freeze_trainable_layers", Only("2", "set `trained_parameters` in the result")),
    ("freeze_trainable_modules", Only("all", "set `trained_parameters` in the result")),
    ("freeze_extra_modules", LeftOut("set `trained_parameters` in the result")),
    ("model_init_kwargs.*", LeftOut("the model is as its config.json says; change it there")),
    ("media_dir", LeftOut(TEXT_ONLY)),
    ("predict_with_generate", LeftOut("evaluation computes the loss on held-out samples")),
    ("compute_accuracy", LeftOut("evaluation computes the loss on held-out samples")),
    ("do_predict", LeftOut("evaluation computes the loss on held-out samples")),
];

/// Keys that change nothing that Phalanx computes or promises.
const WITHOUT_EFFECT: &str = "
    accelerator_config activation_checkpointing activation_checkpointing_kwargs activation_offloading
    adapter_folder apollo_layerwise apollo_proj apollo_proj_type apollo_rank apollo_scale apollo_scale_front
    apollo_scale_type apollo_target apollo_update_interval asft_alpha attn_implementation audio_sampling_rate
    average_tokens_across_devices badam_mask_mode badam_mode badam_start_block badam_switch_interval
    badam_switch_mode badam_update_ratio badam_verbose batch_eval_metrics bf16_full_eval bnb_4bit_quant_storage
    buffer_size cache_dir crop_to_patches data_shared_file_system dataloader_drop_last dataloader_in_order
    dataloader_multiprocessing_context dataloader_num_workers dataloader_persistent_workers dataloader_pin_memory
    dataloader_prefetch_factor dataset_batch_size dataset_num_proc ddp_backend ddp_broadcast_buffers
    ddp_bucket_cap_mb ddp_find_unused_parameters ddp_static_graph ddp_timeout debug disable_tqdm do_eval do_sample
    do_train dtype eaft_alpha enable_jit_checkpoint enable_liger_kernel enable_torch_profiler
    eval_accumulation_steps eval_delay eval_do_concat_batches eval_num_beams eval_on_each_dataset eval_on_start
    eval_packing eval_use_gather_object export_device export_dir export_hub_model_id export_legacy_format
    export_quantization_dataset export_quantization_maxlen export_quantization_nsamples export_size flash_attn
    fp16_backend fp16_full_eval fp16_opt_level fp8_backend fp8_enable_fsdp_float8_all_gather
    freeze_multi_modal_projector freeze_vision_tower full_determinism galore_layerwise galore_proj_type
    galore_rank galore_scale galore_target galore_update_interval generation_config generation_max_length
    generation_num_beams gradient_checkpointing_kwargs group_by_length half_precision_backend hf_hub_token
    hub_always_push hub_strategy hub_token ignore_bias_buffers
    ignore_pad_token_for_loss image_do_pan_and_scan image_max_pixels image_min_pixels
    include_effective_tokens_per_second include_for_metrics include_inputs_for_metrics
    include_num_input_tokens_seen include_tokens_per_second infer_backend infer_dtype init_special_tokens
    jit_mode_eval kt_cpu_activation kt_expert_checkpoint_path kt_lora_expert_intermediate_size kt_lora_expert_num
    kt_non_expert_weight_path kt_use_lora_experts kt_weight_path label_names length_column_name length_penalty
    liger_kernel_config local_rank log_level log_level_replica log_on_each_node logging_dir logging_first_step
    logging_nan_inf_filter logging_strategy lora_on_cpu low_cpu_mem_usage master_addr master_port max_new_tokens
    moe_aux_loss_coef ms_hub_token num_beams offload_folder oft_block_size oft_rank oft_target om_hub_token
    overwrite_cache overwrite_output_dir pad_to_multiple_of pad_token padding_free past_index
    per_device_eval_batch_size per_gpu_eval_batch_size pissa_convert pissa_iter placement_strategy plot_loss
    prediction_loss_only preprocessing_batch_size preprocessing_num_workers print_param_status profiler_output_dir
    profile_modules
    profiler_active_steps profiler_profile_memory profiler_record_shapes profiler_repeat profiler_wait_steps
    profiler_warmup_steps profiler_with_stack project quantization_device_map ray_init_kwargs ray_num_workers ray_run_name
    ray_scope ray_storage_path remove_unused_columns repetition_penalty report_to resize_vocab
    resources_per_worker restore_callback_states_from_checkpoint router_aux_loss_coef run_name save_on_each_node
    save_only_model save_safetensors sglang_config sglang_lora_backend sglang_maxlen sglang_mem_fraction
    sglang_tp_size shuffle_dataset skip_memory_metrics skip_special_tokens sortish_sampler split_batches
    swanlab_api_key swanlab_lark_secret swanlab_lark_webhook_url swanlab_logdir swanlab_mode swanlab_project
    swanlab_run_name swanlab_workspace temperature tf32 top_k top_p torch_compile torch_compile_backend
    torch_compile_mode torch_dtype torch_empty_cache_steps torchdynamo trackio_bucket_id trackio_space_id
    trackio_static_space_id trust_remote_code upcast_layernorm upcast_lmhead_output use_audio_in_video use_cache
    use_fast_tokenizer use_ipex use_kv_cache use_legacy_prediction_loop use_liger use_liger_kernel
    use_reentrant_gc use_swanlab use_unsloth use_unsloth_gc use_v1_kernels video_fps video_max_pixels video_maxlen
    video_min_pixels vllm_config vllm_enforce_eager vllm_gpu_util vllm_max_lora_rank vllm_maxlen
";

/// Whether the keys are those of Hugging Face's trainer; then also which tool's.
pub(super) fn tool_of(file: &Mapping) -> Option<&'static str> {
    let has = |keys: &[&str]| keys.iter().any(|key| file.contains_key(*key));
    if !has(&MARKS) || has(&["base_model"]) {
        return None;
    }
    Some(match (has(&LLAMA_FACTORY), has(&TRL) || preference::is_of_trl(file)) {
        (true, _) => "LLaMA-Factory",
        (_, true) => "TRL",
        _ => "Hugging Face's trainer",
    })
}

/// The name here of a key of these tools, for hints.
pub(in crate::config) fn synonym(key: &str) -> Option<&'static str> {
    let of_rule = RULES.iter().filter_map(|(name, then)| match then {
        Key(ours) => Some((*name, *ours)),
        _ => None,
    });
    of_rule.chain(ADAPTER_KEYS.iter().copied()).find(|(name, ours)| *name == key && name != ours).map(|(_, ours)| ours)
}

/// A rule for every key.
fn rules() -> Vec<Rule> {
    let of_adapters = ADAPTER_KEYS.iter().map(|(key, _)| (*key, Part));
    let of_preference = preference::RULES.iter().copied();
    RULES
        .iter()
        .copied()
        .chain(of_preference)
        .chain(of_adapters)
        .chain(WITHOUT_EFFECT.split_whitespace().map(|key| (key, NoEffect)))
        .collect()
}

/// Every key that has a rule.
#[cfg(test)]
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    rules().into_iter().map(|(name, _)| name.trim_end_matches(".*"))
}

/// What the file says, in keys of Phalanx.
pub(super) fn converted(tool: &str, file: &Mapping, read: &ReadFile<'_>, pairs_at: &PairsAt<'_>) -> Converted {
    let mut converted = Converted::default();
    let method = Method::of(tool, file, pairs_at, &mut converted);
    defaults(tool, file, &mut converted);
    if let Some(method) = method {
        method.defaults(tool, &mut converted);
    }
    let schedule = sharding(file, read, &mut converted);
    converted.add("", convert(&rules(), file));
    if let Some(schedule) = schedule {
        deepspeed::overrule("lr_scheduler_type", schedule, &mut converted);
    }
    adapters(tool, file, &mut converted);
    match method {
        Some(method) => method.apply(tool, file, &mut converted),
        None => loss_of_texts(file, &mut converted),
    }
    data::datasets(tool, method, file, read, &mut converted);
    overruled(&mut converted);
    converted
}

/// The parts of the file that other tables convert. Returns the schedule of DeepSpeed, if it has one.
fn sharding(file: &Mapping, read: &ReadFile<'_>, to: &mut Converted) -> Option<Value> {
    let of_deepspeed = match at(file, "deepspeed") {
        Some(Value::Mapping(config)) => Some(deepspeed::converted(config)),
        Some(path) => {
            let found = deepspeed::of_file(shown(path).as_ref(), read);
            found.map_err(|why| to.leave_out("deepspeed", why)).ok()
        }
        None => None,
    };
    let schedule = of_deepspeed.as_ref().and_then(|converted| converted.keys.get("lr_scheduler").cloned());
    to.add("deepspeed", of_deepspeed.unwrap_or_default());
    match at(file, "fsdp") {
        Some(Value::Sequence(words)) => to.add("", fsdp::of_words(&words.iter().map(shown).collect::<Vec<_>>())),
        Some(words) if truth(words).is_none() => {
            let words: Vec<String> = shown(words).split_whitespace().map(str::to_owned).collect();
            to.add("", fsdp::of_words(&words));
        }
        _ => {}
    }
    if let Some(options) = at(file, "fsdp_config").and_then(Value::as_mapping) {
        to.add("fsdp_config", fsdp::converted(options));
    }
    schedule
}

fn revision(value: &Value, _: &Mapping, to: &mut Converted) {
    if value != "main" {
        to.set("revision_of_model", value.clone());
    }
}

/// Updates go before epochs.
fn epochs(value: &Value, file: &Mapping, to: &mut Converted) {
    if at(file, "max_steps").and_then(whole).is_none_or(|n| n == 0) {
        to.set("num_epochs", value.clone());
    }
}

fn data_seed(value: &Value, file: &Mapping, to: &mut Converted) {
    if at(file, "seed").or(Some(&42.into())) != Some(value) {
        to.leave_out("data_seed", "`seed` orders the data too");
    }
}

/// Of samples in TRL, and of generated texts in LLaMA-Factory.
fn max_length(value: &Value, file: &Mapping, to: &mut Converted) {
    match tool_of(file) {
        Some("LLaMA-Factory") => to.no_effect.push("max_length".into()),
        _ => to.set("sequence_len", value.clone()),
    }
}

/// -1 and 0 stand for as many updates as the epochs have.
fn max_steps(value: &Value, _: &Mapping, to: &mut Converted) {
    if number(value).is_none_or(|n| n > 0.0) {
        to.set("max_steps", value.clone());
    }
}

fn schedule(value: &Value, file: &Mapping, to: &mut Converted) {
    to.set("lr_scheduler", value.clone());
    let Some(options) = at(file, "lr_scheduler_kwargs").and_then(Value::as_mapping) else { return };
    // The keys of a file have no order.
    let given = at(file, "learning_rate").cloned();
    let peak = given.or_else(|| default_of(tool_of(file)?, "learning_rate")).as_ref().and_then(number);
    for (key, value) in options {
        match (shown(key).as_str(), number(value), peak) {
            ("min_lr_rate", Some(share), _) => to.set("cosine_min_lr_ratio", share),
            ("min_lr", Some(lowest), Some(peak)) if peak > 0.0 => to.set("cosine_min_lr_ratio", lowest / peak),
            (key, ..) => to.leave_out(
                &format!("lr_scheduler_kwargs.{key}"),
                "the schedule has no such parameter; see the keys of `lr_scheduler`",
            ),
        }
    }
}

fn warmup_steps(value: &Value, file: &Mapping, to: &mut Converted) {
    warm_up("warmup_steps", value, file, to);
}

/// A number of steps goes before a share.
fn warmup_ratio(value: &Value, file: &Mapping, to: &mut Converted) {
    if at(file, "warmup_steps").and_then(number).is_none_or(|n| n == 0.0) {
        to.keys.remove("warmup_steps");
        warm_up("warmup_ratio", value, file, to);
    }
}

/// The schedule `constant` of these tools has no warm-up, whatever its length.
fn warm_up(key: &str, value: &Value, file: &Mapping, to: &mut Converted) {
    if number(value) == Some(0.0) {
        return;
    }
    match at(file, "lr_scheduler_type").is_some_and(|kind| kind == "constant") {
        true => to.notes.push(format!(
            "`{key}`: the schedule `constant` of this tool has no warm-up, so the result has none; for one, set `{key}: {}` there",
            shown(value)
        )),
        false => to.set(key, value.clone()),
    }
}

fn max_grad_norm(value: &Value, _: &Mapping, to: &mut Converted) {
    to.set("max_grad_norm", if number(value) == Some(0.0) { "none".into() } else { value.clone() });
}

fn optimizer(value: &Value, file: &Mapping, to: &mut Converted) {
    match shown(value).as_str() {
        "adamw_torch" | "adamw_torch_fused" | "adamw_hf" => to.set("optimizer", "adamw"),
        "lion_32bit" | "paged_lion_32bit" => {
            to.set("optimizer", "lion");
            // The default here is that of the paper; the trainer gives Lion the betas of Adam.
            to.set("adam_beta2", at(file, "adam_beta2").cloned().unwrap_or(0.999.into()));
        }
        "adafactor" => {
            to.set("optimizer", "adafactor");
            to.notes.push(format!("`optim`: {ADAFACTOR}"));
        }
        word => to.set("optimizer", word),
    }
}

fn pure_bf16(value: &Value, _: &Mapping, to: &mut Converted) {
    if truth(value) == Some(true) {
        to.set("bf16", "full");
    }
}

/// A share of all steps has no counterpart, and changes only what is printed.
fn logging_steps(value: &Value, _: &Mapping, to: &mut Converted) {
    match whole(value) {
        Some(n) if n > 0 => to.set("logging_steps", n),
        _ => to.no_effect.push("logging_steps".into()),
    }
}

fn strategy(file: &Mapping, key: &str) -> String {
    match at(file, key) {
        Some(value) if truth(value) == Some(false) => "no".into(),
        Some(value) => shown(value),
        None => String::new(),
    }
}

fn save_steps(value: &Value, file: &Mapping, to: &mut Converted) {
    if ["", "steps"].contains(&strategy(file, "save_strategy").as_str()) {
        to.set("save_steps", value.clone());
    }
}

fn save_strategy(_: &Value, file: &Mapping, to: &mut Converted) {
    match strategy(file, "save_strategy").as_str() {
        "no" => to.set("save_steps", "none"),
        "epoch" => to.set("saves_per_epoch", 1u64),
        "steps" => {}
        other => to.leave_out("save_strategy", format!("it is {other}; use steps or epoch")),
    }
}

fn eval_strategy(_: &Value, file: &Mapping, to: &mut Converted) {
    let key = if file.contains_key("eval_strategy") { "eval_strategy" } else { "evaluation_strategy" };
    match strategy(file, key).as_str() {
        "epoch" => to.set("evals_per_epoch", 1u64),
        "steps" => {
            let steps = at(file, "eval_steps").or_else(|| at(file, "logging_steps")).cloned();
            to.set("eval_steps", steps.unwrap_or(500u64.into()));
        }
        "no" => {}
        other => to.leave_out(key, format!("it is {other}; use steps or epoch")),
    }
}

/// Defaults of a tool that have a meaning beside other keys only.
fn overruled(to: &mut Converted) {
    let is_on = |key: &str| to.keys.get(key).and_then(truth) == Some(true);
    if !is_on("load_in_4bit") {
        to.keys.remove("bnb_4bit_use_double_quant");
    }
}

fn resume(value: &Value, _: &Mapping, to: &mut Converted) {
    match truth(value) {
        Some(true) => to.set("resume_from_checkpoint", "auto"),
        Some(false) => to.set("resume_from_checkpoint", "none"),
        None => to.leave_out("resume_from_checkpoint", "a checkpoint of another trainer cannot be continued"),
    }
}

/// Only this key asks for an upload.
fn push_to_hub(value: &Value, file: &Mapping, to: &mut Converted) {
    if truth(value) != Some(true) {
        return;
    }
    match at(file, "hub_model_id").map(shown).filter(|name| name.contains('/')) {
        Some(name) => to.set("hub_model_id", name),
        None => to.leave_out(
            "push_to_hub",
            "set `hub_model_id` to a name with its owner, such as me/my-model, in the result",
        ),
    }
    if at(file, "hub_private_repo").and_then(truth) == Some(true) {
        to.set("hub_private_repo", true);
    }
    if let Some(revision) = at(file, "hub_revision").map(shown) {
        to.set("hub_revision", revision);
    }
}

fn use_cpu(value: &Value, _: &Mapping, to: &mut Converted) {
    if truth(value) == Some(true) {
        to.set("device", "cpu");
    }
}

fn sampling(value: &Value, _: &Mapping, to: &mut Converted) {
    match shown(value).as_str() {
        "sequential" => to.set("shuffle", false),
        "random" => to.set("shuffle", true),
        _ => to.no_effect.push("train_sampling_strategy".into()),
    }
}

fn no_shuffling(value: &Value, _: &Mapping, to: &mut Converted) {
    if truth(value) == Some(true) {
        to.set("shuffle", false);
    }
}

/// Adapters, if the file asks for them, with the defaults of PEFT or LLaMA-Factory.
fn adapters(tool: &str, file: &Mapping, to: &mut Converted) {
    let rank = at(file, "lora_rank").and_then(whole).unwrap_or(8);
    let defaults: [(&str, Value); 4] = match at(file, "finetuning_type").map(shown).as_deref() {
        None | Some("lora") if tool == "LLaMA-Factory" => [
            ("lora_r", rank.into()),
            ("lora_alpha", (2 * rank).into()),
            ("lora_dropout", 0.0.into()),
            ("lora_target_linear", true.into()),
        ],
        Some("full") | None if at(file, "use_peft").and_then(truth) != Some(true) => {
            let given =
                ADAPTER_KEYS.iter().map(|(key, _)| (*key).to_owned()).filter(|key| file.contains_key(key.as_str()));
            return to.no_effect.extend(given);
        }
        None => [
            ("lora_r", 16u64.into()),
            ("lora_alpha", 32u64.into()),
            ("lora_dropout", 0.05.into()),
            ("lora_target_modules", vec![Value::from("q_proj"), Value::from("v_proj")].into()),
        ],
        Some(other) => return to.leave_out("finetuning_type", format!("it is {other}; use full or lora")),
    };
    to.set("adapter", "lora");
    let names_targets = ["lora_target", "lora_target_modules"].iter().any(|key| at(file, key).is_some());
    for (key, value) in defaults.into_iter().filter(|(key, _)| !(names_targets && key.contains("target"))) {
        to.set(key, value);
    }
    for (key, ours) in ADAPTER_KEYS {
        let Some(value) = at(file, key) else { continue };
        match (*key, shown(value).as_str()) {
            ("lora_target", "all") | ("lora_target_modules", "all-linear") => {
                to.set_from(key, "lora_target_linear", true)
            }
            ("lora_target" | "additional_target", _) => to.set_from(key, ours, data::names(value)),
            _ => to.set_from(key, ours, value.clone()),
        }
    }
}

/// Keys of adapters, and their names here.
const ADAPTER_KEYS: &[(&str, &str)] = &[
    ("lora_r", "lora_r"),
    ("lora_rank", "lora_r"),
    ("lora_alpha", "lora_alpha"),
    ("lora_dropout", "lora_dropout"),
    ("lora_target_modules", "lora_target_modules"),
    ("lora_target", "lora_target_modules"),
    ("lora_modules_to_save", "lora_modules_to_save"),
    ("additional_target", "lora_modules_to_save"),
    ("loraplus_lr_ratio", "loraplus_lr_ratio"),
    ("use_rslora", "peft_use_rslora"),
    ("use_dora", "peft_use_dora"),
];

fn task_type(value: &Value, _: &Mapping, to: &mut Converted) {
    if value != "CAUSAL_LM" && value != "SEQ_CLS" {
        to.leave_out("lora_task_type", "only language models and reward models are trained");
    }
}

fn quantization_bit(value: &Value, _: &Mapping, to: &mut Converted) {
    match whole(value) {
        Some(4) => to.set("load_in_4bit", true),
        Some(8) => to.set("load_in_8bit", true),
        _ => to.leave_out("quantization_bit", format!("it is {}, but must be 4 or 8", shown(value))),
    }
}

fn four_bits(value: &Value, file: &Mapping, to: &mut Converted) {
    if value != "nf4" {
        let key = if file.contains_key("quantization_type") { "quantization_type" } else { "bnb_4bit_quant_type" };
        to.leave_out(key, "weights of 4 bits are nf4");
    }
}

fn double_quantization(value: &Value, _: &Mapping, to: &mut Converted) {
    to.set("bnb_4bit_use_double_quant", value.clone());
}

fn quantization_method(value: &Value, _: &Mapping, to: &mut Converted) {
    if !["bnb", "bitsandbytes"].contains(&shown(value).to_lowercase().as_str()) {
        to.leave_out("quantization_method", "weights are quantized as by bitsandbytes");
    }
}

fn stage(value: &Value, _: &Mapping, to: &mut Converted) {
    match shown(value).as_str() {
        "sft" | "pt" | "dpo" | "kto" | "rm" => {}
        "ppo" => to.leave_out("stage", NO_REINFORCEMENT),
        _ => to.leave_out("stage", "use sft, pt, dpo, kto or rm"),
    }
}

fn loss_of_texts(file: &Mapping, to: &mut Converted) {
    let is_of_texts = |loss: &Value| ["nll", "chunked_nll"].contains(&shown(loss).as_str());
    if at(file, "loss_type").is_some_and(|loss| !is_of_texts(loss)) {
        to.leave_out("loss_type", CROSS_ENTROPY);
    }
}
