//! The data of a job, as the data module reads it.

use super::pattern::matching;
use crate::config::JobConfig;
use crate::config::chat_template::ChatTemplateChoice;
use crate::config::dataset_type::PromptSection;
use crate::config::datasets::{self, DatasetType, ValSetSize};
use crate::config::pair_form::PairForm;
use crate::data::config::{DataConfig, PairFields};
use crate::data::recognised::has_messages;
use crate::data::{config as data, sources};
use crate::error::JobError;
use phalanx_storage::home::expanded;
use phalanx_storage::hub::cache::HubCache;
use phalanx_strategies::objective::{Objective, SecondRow};
use std::path::PathBuf;

/// Converts the data section to the types of the data module and expands patterns.
pub(crate) fn data_config(config: &JobConfig) -> Result<DataConfig, JobError> {
    let d = &config.data;
    let expanded = |entries: &[datasets::DatasetConfig]| {
        entries.iter().map(|dataset| expanded_config(dataset, config)).collect::<Result<Vec<_>, JobError>>()
    };
    Ok(DataConfig {
        datasets: expanded(&d.datasets)?,
        test_datasets: expanded(&d.test_datasets)?,
        sequence_len: d.sequence_len,
        sample_packing: d.sample_packing,
        sample_packing_sequentially: d.sample_packing_sequentially,
        shuffle: d.shuffle,
        seed: config.output.seed,
        val_set_size: match d.val_set_size {
            ValSetSize::Nothing => 0.0,
            ValSetSize::Share(share) => share,
            ValSetSize::Samples(n) => n as f64,
        },
        train_on_inputs: d.train_on_inputs,
        excess_length_strategy: d.excess_length_strategy,
        min_sample_len: d.min_sample_len,
        deduplicate: d.dataset_exact_deduplication,
        skip_bad_records: d.skip_bad_records,
        second_row: config.objective().second_row(),
        stream_rows: config
            .schedule
            .max_steps
            .filter(|_| d.streaming)
            .map(|steps| steps.saturating_mul(config.sequences_per_step() as u64)),
    })
}

fn expanded_config(dataset: &datasets::DatasetConfig, config: &JobConfig) -> Result<data::DatasetConfig, JobError> {
    let path = located(dataset)?;
    Ok(data::DatasetConfig { files: matching(&path)?, path, ..dataset_config(dataset, config) })
}

/// The data sets whose records a chat template renders; of pairs in columns, the first record tells.
pub(super) fn conversations(config: &JobConfig) -> Vec<&datasets::DatasetConfig> {
    let is_rendered = |dataset: &&datasets::DatasetConfig| match dataset.r#type {
        DatasetType::Preference(_) => expanded_config(dataset, config).is_ok_and(|found| has_messages(&found)),
        kind => kind.is_conversation(),
    };
    config.data.datasets.iter().filter(is_rendered).collect()
}

/// Where a data set is: at its path, or in the cache of the Hub.
fn located(dataset: &datasets::DatasetConfig) -> Result<PathBuf, JobError> {
    let is_loader = dataset.data_files.is_some();
    Ok(sources::located(&dataset.path, dataset.revision.as_deref(), is_loader, &HubCache::of_user())?)
}

fn dataset_config(d: &datasets::DatasetConfig, config: &JobConfig) -> data::DatasetConfig {
    let job = &config.data;
    data::DatasetConfig {
        path: d.path.clone(),
        files: Vec::new(),
        kind: d.r#type,
        ds_type: d.ds_type,
        split: d.split.clone(),
        name: d.name.clone(),
        data_files: d
            .data_files
            .iter()
            .flat_map(|files| &files.0)
            .map(|name| expanded(name).to_string_lossy().into_owned())
            .collect(),
        shards: d.shards.map(|count| (count, d.shards_idx)),
        weight: d.weight,
        field: d.field.clone(),
        prompt: d.prompt.as_ref().map(PromptSection::prompt),
        pair: pair_fields(d, &config.objective()),
        conversation: conversation_config(d, &job.eot_tokens),
        template: template_config(d, job),
        loss_weights: job.loss_weights,
    }
}

fn pair_fields(d: &datasets::DatasetConfig, objective: &Objective) -> Option<PairFields> {
    let DatasetType::Preference(form) = d.r#type else { return None };
    let default = PairFields::default();
    let prompt = match form {
        PairForm::Messages => d.field_messages.clone().unwrap_or_else(|| "messages".into()),
        PairForm::Answers => d.field_prompt.clone().unwrap_or_else(|| "input".into()),
        _ => d.field_prompt.clone().unwrap_or(default.prompt),
    };
    let chosen = d.field_chosen.clone().unwrap_or(default.chosen);
    let rejected = d.field_rejected.clone().unwrap_or(default.rejected);
    Some(PairFields {
        form,
        formats: d.pair.clone().unwrap_or_default(),
        prompt,
        chosen,
        rejected,
        labelled: objective.second_row() == Some(SecondRow::Mismatched),
        bounds_conversations: !objective.has_scores() && (!objective.has_reference() || form != PairForm::Columns),
        aligned: objective.has_reference(),
        whole: objective.has_scores(),
    })
}

fn conversation_config(d: &datasets::DatasetConfig, eot_tokens: &[String]) -> data::ConversationConfig {
    let default = match d.r#type {
        DatasetType::Sharegpt => data::ConversationConfig::sharegpt(),
        _ => data::ConversationConfig::default(),
    };
    let mut properties = default.properties;
    let older = [("role", &d.message_field_role), ("content", &d.message_field_content)];
    properties.extend(older.into_iter().filter_map(|(name, field)| Some((name.to_owned(), field.clone()?))));
    let thinking_key = d.template_thinking_key.clone().unwrap_or(default.thinking_key);
    if let Some(field) = d.field_thinking.clone().filter(|field| *field != thinking_key) {
        properties.insert(thinking_key.clone(), field);
    }
    properties.extend(d.message_property_mappings.0.clone());
    data::ConversationConfig {
        // Of pairs, it is the field of the prompt, and their conversations are put together with names of their own.
        field_messages: d.field_messages.clone().filter(|_| !d.r#type.is_pair()).unwrap_or(default.field_messages),
        field_tools: d.field_tools.clone().unwrap_or(default.field_tools),
        properties,
        roles: d.roles.0.clone(),
        roles_to_train: d.roles_to_train.clone(),
        field_training: d.message_field_training.clone(),
        field_training_detail: d.message_field_training_detail.clone(),
        split_thinking: d.split_thinking,
        thinking_key,
        drop_system_message: d.drop_system_message,
        markers: data::MarkerConfig {
            eos: None,
            eot: eot_tokens.to_vec(),
            train_on_eos: d.train_on_eos,
            train_on_eot: d.train_on_eot.of_its_own(),
        },
    }
}

/// A data set with a template of its own uses nothing of the job's.
pub(super) fn template_config(d: &datasets::DatasetConfig, job: &datasets::DataSection) -> data::TemplateConfig {
    let (choice, jinja) = match (d.chat_template, &d.chat_template_jinja) {
        (None, None) => (job.chat_template, &job.chat_template_jinja),
        (choice, jinja) => (choice.unwrap_or(ChatTemplateChoice::Jinja), jinja),
    };
    data::TemplateConfig { choice, jinja: jinja.clone(), variables: job.chat_template_kwargs.0.clone() }
}
