//! From the keys of a YAML file through data and schedule to the metrics of a step.

use anyhow::{Context, Result, ensure};
use phalanx::config::datasets::DatasetType;
use phalanx::data::columns::Columns;
use phalanx::data::config::{DataConfig, DatasetConfig};
use phalanx::data::prepare::prepare;
use phalanx::data::rows::Rows;
use phalanx::data::tokenizer::Tokenizer;
use phalanx::events::{EvalMetrics, StepMetrics};
use phalanx::{Control, Event, Job};
use phalanx_strategies::model::BatchShape;
use phalanx_strategies::program::Column;
use phalanx_strategies::rng::CounterRng;
use phalanx_strategies::sampler::Sampler;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

const SEQUENCE_LEN: usize = 48;

/// Writes 60 different documents of several lengths, none longer than a row.
fn documents(dir: &Path) -> Result<PathBuf> {
    let path = dir.join("documents.jsonl");
    let line = |i: usize| format!("{{\"text\": \"{i:02} {}\"}}\n", "hoplon".repeat(1 + i % 6));
    std::fs::write(&path, (0..60).map(line).collect::<String>())?;
    Ok(path)
}

/// Trains a tiny model on the documents with these keys.
fn train(keys: &str) -> Result<(Vec<StepMetrics>, Vec<EvalMetrics>)> {
    let dir = tempfile::tempdir()?;
    let yaml = dir.path().join("job.yaml");
    let text = format!(
        "model:\n  model_type: llama\n  hidden_size: 16\n  intermediate_size: 24\n  num_hidden_layers: 1\n  \
         num_attention_heads: 2\n  max_position_embeddings: {SEQUENCE_LEN}\n  initializer_range: 0.3\n\
         tokenizer: bytes\ndatasets:\n  - path: {}\n    type: completion\nsequence_len: {SEQUENCE_LEN}\n\
         output_dir: {}\n{keys}\n",
        documents(dir.path())?.display(),
        dir.path().join("out").display(),
    );
    std::fs::write(&yaml, text)?;
    let (mut steps, mut evals) = (Vec::new(), Vec::new());
    Job::from_yaml(&yaml)?.run_with(&Control::default(), |event| match event {
        Event::Step(m) => steps.push(m.clone()),
        Event::Eval(m) => evals.push(m.clone()),
        _ => {}
    })?;
    Ok((steps, evals))
}

/// Summed loss and predicted tokens of one pass over the documents with constant weights.
fn sum_over_an_epoch(keys: &str) -> Result<(usize, f64, u64)> {
    let (steps, _) = train(&format!("learning_rate: 0.0\nnum_epochs: 1\nmicro_batch_size: 1\n{keys}"))?;
    let loss = steps.iter().map(|m| m.loss * m.predicted_tokens as f64).sum();
    Ok((steps.len(), loss, steps.iter().map(|m| m.predicted_tokens).sum()))
}

#[test]
fn packed_documents_sum_to_the_loss_of_one_document_per_row() -> Result<()> {
    let (n_rows, loss, predicted) = sum_over_an_epoch("sample_packing: false")?;
    let (n_packed, packed_loss, packed_predicted) = sum_over_an_epoch("sample_packing: true")?;

    ensure!(n_rows == 60 && n_packed < 45, "{n_rows} rows, {n_packed} packed");
    ensure!(predicted == packed_predicted, "{predicted} tokens predicted, {packed_predicted} when packed");
    // Each token's loss is exact up to f32's rounding, and the roundings do not add up.
    ensure!((packed_loss / loss - 1.0).abs() < 1e-6, "{packed_loss} is not {loss}");
    Ok(())
}

/// The texts of the documents that the rows at `picked` hold: ids up to the padding, which is not predicted.
fn texts(rows: &Rows, picked: &[u64]) -> BTreeSet<String> {
    let n = rows.row_len();
    const COLUMNS: [Column; 3] = [Column::Ids, Column::Labels, Column::DocStart];
    let mut batch = Columns::new(COLUMNS, BatchShape { n_rows: 1, seq_len: n });
    let mut texts = BTreeSet::new();
    for row in picked {
        rows.fill(&[*row], CounterRng::new(0), &mut batch).expect("the cache can be read");
        let [ids, labels, doc_start] = COLUMNS.map(|column| batch.of(column));
        for start in (0..n).filter(|t| doc_start[*t] == *t as i32 && labels[*t] >= 0) {
            let document = (start..n).take_while(|t| doc_start[*t] == start as i32);
            texts.insert(document.filter_map(|t| u8::try_from(ids[t]).ok()).map(char::from).collect());
        }
    }
    texts
}

#[test]
fn validation_documents_are_never_trained_on() -> Result<()> {
    for packing in [false, true] {
        let dir = tempfile::tempdir()?;
        let dataset = DatasetConfig::new(documents(dir.path())?, DatasetType::Completion);
        let mut config = DataConfig::new(vec![dataset], SEQUENCE_LEN);
        (config.sample_packing, config.val_set_size) = (packing, 0.25);
        let prepared = prepare(&config, &Tokenizer::bytes(), &dir.path().join("cache"), 512, &|_| Ok(()))?;
        let validation = prepared.validation.context("a quarter is held out")?;

        let sampler = Sampler::new(config.seed, prepared.train.len() as u64, 4, true)?;
        let mut trained = BTreeSet::new();
        for step in 0..sampler.steps_for_epochs(3) {
            let mut picked = [0; 4];
            sampler.fill_step(step, 0, &mut picked);
            trained.extend(texts(&prepared.train, &picked));
        }
        let held_out = texts(&validation, &(0..validation.len() as u64).collect::<Vec<_>>());

        let both: Vec<_> = trained.intersection(&held_out).collect();
        ensure!(both.is_empty(), "packing {packing}: {both:?}");
        ensure!(trained.len() + held_out.len() == 60, "{} and {} of 60", trained.len(), held_out.len());
        ensure!(held_out.len() >= 5, "packing {packing}: {} held out", held_out.len());
    }
    Ok(())
}

#[test]
fn evaluation_is_the_loss_over_the_held_out_rows() -> Result<()> {
    let keys = "learning_rate: 0.0\nnum_epochs: 1\nmicro_batch_size: 1\nseed: 5";
    let (steps, _) = train(keys)?;
    let (fewer_steps, evals) = train(&format!("{keys}\nval_set_size: 13\neval_steps: 20"))?;

    // Held-out documents are evaluated, so the two sums add up to the sum over all documents.
    let sum = |steps: &[StepMetrics]| steps.iter().map(|m| m.loss * m.predicted_tokens as f64).sum::<f64>();
    let predicted = |steps: &[StepMetrics]| steps.iter().map(|m| m.predicted_tokens).sum::<u64>();
    let held_out = (predicted(&steps) - predicted(&fewer_steps)) as f64;
    ensure!(fewer_steps.len() == 47, "{} steps", fewer_steps.len());
    ensure!(evals.iter().map(|e| e.step).eq([20, 40, 47]), "{evals:?}");
    for eval in evals {
        let whole = sum(&fewer_steps) + eval.eval_loss * held_out;
        ensure!((whole / sum(&steps) - 1.0).abs() < 1e-6, "{whole} is not {}", sum(&steps));
        let perplexity = eval.eval_perplexity.context("a likelihood has a perplexity")?;
        ensure!((perplexity / eval.eval_loss.exp() - 1.0).abs() < 1e-12, "{eval:?}");
    }
    Ok(())
}

/// Learning rates of a run of 20 steps with a peak of 0.01.
fn learning_rates(keys: &str) -> Result<Vec<f64>> {
    let (steps, _) = train(&format!("learning_rate: 0.01\nmax_steps: 20\nwarmup_steps: 4\n{keys}"))?;
    Ok(steps.iter().map(|m| m.lr).collect())
}

/// Checks each step's rate against the formula of the keys; `t` counts from 0.
fn assert_rates(keys: &str, after_warmup: impl Fn(f64) -> f64) -> Result<()> {
    let rates = learning_rates(keys)?;
    ensure!(rates.len() == 20, "{keys}: {} steps", rates.len());
    for (t, rate) in rates.into_iter().enumerate() {
        let t = t as f64;
        let expected = if t < 4.0 { 0.01 * (t + 1.0) / 4.0 } else { after_warmup(t) };
        ensure!((rate - expected).abs() < 1e-12, "{keys}, step {t}: {rate} is not {expected}");
    }
    Ok(())
}

#[test]
fn learning_rates_follow_the_configured_schedule() -> Result<()> {
    assert_rates("lr_scheduler: constant", |_| 0.01)?;
    assert_rates("lr_scheduler: linear", |t| 0.01 * (20.0 - t) / 16.0)?;
    let cosine = |t: f64| 0.5 * (1.0 + (std::f64::consts::PI * (t - 4.0) / 16.0).cos());
    assert_rates("lr_scheduler: cosine", |t| 0.01 * cosine(t))?;
    assert_rates("lr_scheduler: cosine\ncosine_min_lr_ratio: 0.2", |t| 0.01 * (0.2 + 0.8 * cosine(t)))?;
    assert_rates("lr_scheduler: wsd\ndecay_ratio: 0.25", |t| if t < 15.0 { 0.01 } else { 0.01 * (20.0 - t) / 5.0 })
}
