//! Gradients of small random models of every family, for every split of the step, against finite differences and against
//! each other.

mod case;

use case::{Bench, Case, Data, adapters, cases, distance, norm};
use phalanx_strategies::compile::Compiled;
use phalanx_strategies::model::ModelConfig;
use phalanx_strategies::passes::precision::Precision;
use phalanx_strategies::passes::recompute::Recompute;
use phalanx_strategies::program::{Op, Phase, ValueId};
use phalanx_strategies::verify::verify;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{RngSeed, TestCaseError};

/// Largest middle step of the differences. The loss is about 4 and computed in f32, so its error is some 1e-7. The formula
/// divides that error by the shortest step, while its own error falls with the step's sixth power.
const STEP_MAX: f64 = 0.02;
/// Change of the loss at which a step is long enough; a steep loss needs shorter steps.
const CHANGE: f64 = 0.01;
/// Bound of both errors: absolute, and as a share of the gradient's norm.
const DIFFERENCE_BOUND: (f64, f64) = (3e-5, 4e-4);
/// Error of another order of f32 sums over some hundred terms, relative to the whole gradient.
const ROUNDING_BOUND: f64 = 2e-6;

const N_CASES: u32 = 48;

fn precisions() -> impl Strategy<Value = Precision> {
    prop::sample::select(vec![Precision::F32, Precision::Bf16, Precision::F16])
}

fn config(cases: u32) -> ProptestConfig {
    // The same cases in every run, so that a bound that holds once holds always.
    let rng_seed = RngSeed::Fixed(20_260_101);
    ProptestConfig { cases, failure_persistence: None, rng_seed, ..ProptestConfig::default() }
}

/// Compares the gradient of every tensor with the slope of the loss along a direction. The direction is half the gradient,
/// to detect a wrong length, and half random, to detect a missing part. Returns the largest error relative to its bound.
fn slope_error(case: &Case, bench: &mut Bench) -> (f64, String) {
    let (data, weights) = (case.data(), case.weights());
    let (_, grads) = bench.step(&data, 0.0);
    let mut worst = (0.0, String::new());
    for (name, grad) in &grads {
        let direction = direction(case, name, grad);
        let expected: f64 = grad.iter().zip(&direction).map(|(g, d)| f64::from(*g) * f64::from(*d)).sum();
        let step = STEP_MAX.min(CHANGE / norm(grad));
        let mut loss_at = |h: f64| {
            let mut moved = weights.clone();
            let tensor = moved.get_mut(name).expect("a gradient belongs to a weight");
            tensor.iter_mut().zip(&direction).for_each(|(w, d)| *w += h as f32 * d);
            bench.set_weights(&moved);
            bench.loss(&data)
        };
        // Source: Romberg 1955; central differences over three steps, extrapolated twice.
        let [d1, d2, d4] = [0.5, 1.0, 2.0].map(|k| (loss_at(k * step) - loss_at(-k * step)) / (2.0 * k * step));
        let slope = (16.0 * (4.0 * d1 - d2) - (4.0 * d2 - d4)) / 45.0;
        let error = (slope - expected).abs() / (DIFFERENCE_BOUND.0 + DIFFERENCE_BOUND.1 * norm(grad));
        if error > worst.0 || error.is_nan() {
            worst = (error, format!("{name}: slope {slope:.6}, gradient {expected:.6}, norm {:.6}", norm(grad)));
        }
    }
    bench.set_weights(&weights);
    worst
}

/// The unit vector halfway between a gradient and a random direction.
fn direction(case: &Case, name: &str, grad: &[f32]) -> Vec<f32> {
    let rng = case.rng("direction").fork_named(name);
    let random: Vec<f32> = (0..grad.len()).map(|i| rng.normal(i as u64) as f32).collect();
    let (of_grad, of_random) = (1.0 / norm(grad).max(1e-30), 1.0 / norm(&random));
    let sum: Vec<f32> = grad.iter().zip(&random).map(|(g, r)| g * of_grad as f32 + r * of_random as f32).collect();
    let length = norm(&sum) as f32;
    sum.iter().map(|x| x / length).collect()
}

fn in_test(condition: bool, message: impl FnOnce() -> String) -> Result<(), TestCaseError> {
    if condition { Ok(()) } else { Err(TestCaseError::fail(message())) }
}

proptest! {
    #![proptest_config(config(N_CASES))]

    #[test]
    fn gradients_are_the_slopes_of_the_loss(case in cases()) {
        let mut bench = Bench::new(&case);

        let (error, what) = slope_error(&case, &mut bench);

        in_test(error < 1.0, || format!("{error:.2} times the bound: {what}"))?;
    }

    #[test]
    fn gradients_of_weighted_tokens_are_the_slopes_of_the_loss(case in cases().prop_filter("a label", |case| case.seq_len > 8)) {
        let case = Case { weighted: true, ..case };
        let mut bench = Bench::new(&case);

        let (error, what) = slope_error(&case, &mut bench);

        in_test(error < 1.0, || format!("{error:.2} times the bound: {what}"))?;
    }

    #[test]
    fn recomputation_changes_no_bit_of_an_update(case in cases(), precision in precisions()) {
        let case = Case { precision, ..case };
        let data = case.data();
        let update = |recompute| {
            let mut bench = Bench::new(&Case { recompute, ..case.clone() });
            let (loss, grads) = bench.step(&data, 0.1);
            (loss.to_bits(), grads, bench.weights())
        };

        let kept = update(Recompute::None);

        in_test(kept.2 != case.weights(), || "the update changes no weight".into())?;
        for policy in [Recompute::Selective, Recompute::Full] {
            in_test(update(policy) == kept, || format!("{policy:?} differs"))?;
        }
    }

    /// Products in bf16 round frozen weights anyway, so storing them rounded changes no bit of a step.
    #[test]
    fn frozen_weights_stored_in_bf16_change_no_bit_of_an_update(case in cases()) {
        let case = Case { precision: Precision::Bf16, lora: Some(adapters(case.model.family)), ..case };
        let data = case.data();
        let stored = |c: &Compiled| c.program.params.iter().filter(|param| param.packing.is_some()).count();
        let update = |train: Compiled| {
            let mut bench = Bench::with_program(&case, train);
            let (loss, grads) = bench.step(&data, 0.1);
            let weights = bench.weights().into_iter().filter(|(name, _)| name.contains("lora")).collect::<Vec<_>>();
            (loss.to_bits(), grads, weights)
        };
        let (narrow, wide) = (case.compile_train(), case.compile_train_in_f32());

        in_test(stored(&narrow) >= 4 && stored(&wide) == 0, || "nothing is stored in bf16, or everything".into())?;
        in_test(update(narrow) == update(wide), || "an update differs".into())?;
    }

    #[test]
    fn accumulated_rows_sum_to_the_gradient_of_the_whole_batch(case in cases()) {
        let n = 3;
        let whole = Case { rows: n, n_microbatches: 1, ..case.clone() };
        let cut = Case { rows: 1, n_microbatches: n, ..case };
        let data = whole.data();

        let (loss, grads) = Bench::new(&whole).step(&data, 0.0);
        let (cut_loss, cut_grads) = Bench::new(&cut).step(&data, 0.0);

        let off = distance(&cut_grads, &grads);
        in_test((cut_loss / loss - 1.0).abs() < 1e-6, || format!("losses {cut_loss} and {loss}"))?;
        in_test(off < ROUNDING_BOUND, || format!("gradients differ by {off:.2e}"))?;
    }

    /// Half precision rounds the same values in both, except gradients of the head's input.
    #[test]
    fn head_in_chunks_has_the_gradient_of_the_whole_head(case in cases(), precision in precisions(), tokens in 1usize..12) {
        let case = Case { precision, ..case };
        let data = case.data();
        let (mut whole, mut chunks) = (Bench::new(&case), Bench::with_head_chunks(&case, tokens));

        let (loss, grads) = whole.step(&data, 0.0);
        let (chunked_loss, chunked_grads) = chunks.step(&data, 0.0);

        let off = distance(&chunked_grads, &grads);
        let bound = if precision == Precision::F32 { ROUNDING_BOUND } else { 2e-4 };
        // A product of one row sums in another order than one of several rows, whose rows have the same bits in any product.
        let has_one_row = tokens == 1 || (case.rows * case.seq_len) % tokens == 1;
        let loss_bound = if has_one_row { 1e-6 } else { 1e-12 };
        in_test((chunked_loss / loss - 1.0).abs() < loss_bound, || format!("losses {chunked_loss} and {loss}"))?;
        in_test((chunks.loss(&data) / loss - 1.0).abs() < 1e-6, || format!("in evaluation {}", chunks.loss(&data)))?;
        in_test(off < bound, || format!("{precision:?}: gradients differ by {off:.2e}"))?;
        let n_losses = |bench: &Bench| {
            bench.train.program.instrs.iter().filter(|i| matches!(i.op, Op::CrossEntropy(_))).count()
        };
        let n_chunks = (case.rows * case.seq_len).div_ceil(tokens);
        in_test(n_losses(&chunks) == n_chunks * n_losses(&whole), || "the head was not cut".into())?;
    }

    #[test]
    fn packed_documents_have_the_gradient_of_separate_rows(case in cases(), weighted in any::<bool>()) {
        let packed = Case { packed: true, weighted, rows: 1, n_microbatches: 1, ..case };
        let separate = Case { rows: 2, ..packed.clone() };
        let data = packed.data();

        let (loss, grads) = Bench::new(&packed).step(&data, 0.0);
        let (separate_loss, separate_grads) = Bench::new(&separate).step(&unpacked(&data, packed.seq_len), 0.0);

        let off = distance(&separate_grads, &grads);
        in_test((separate_loss / loss - 1.0).abs() < 1e-6, || format!("losses {separate_loss} and {loss}"))?;
        in_test(off < ROUNDING_BOUND, || format!("gradients differ by {off:.2e}"))?;
    }

    #[test]
    fn adapters_start_as_the_base_model_and_do_not_change_it(
        case in cases(), precision in precisions(), hidden_size in prop::sample::select(vec![24, 640]),
    ) {
        // The wider products are summed in several blocks, and adding to a residual could round differently.
        let (intermediate_size, head_dim) = (hidden_size + 20, hidden_size / 4);
        let model = ModelConfig { hidden_size, intermediate_size, head_dim, ..case.model };
        let case = Case { lora: Some(adapters(model.family)), model, precision, ..case };
        let base = Case { lora: None, ..case.clone() };
        let data = case.data();
        let mut weights = case.weights();
        weights.iter_mut().filter(|(name, _)| name.contains("lora_B")).for_each(|(_, b)| b.fill(0.0));
        let mut bench = Bench::new(&case);
        bench.set_weights(&weights);

        let loss = Bench::new(&base).loss(&data);
        let adapted_loss = bench.loss(&data);
        let before = bench.weights();
        let (step_loss, _) = bench.step(&data, 0.1);

        in_test(adapted_loss == loss, || format!("{adapted_loss} is not {loss}"))?;
        in_test(step_loss == loss, || format!("in training {step_loss} is not {loss}"))?;
        for (name, tensor) in bench.weights() {
            // A has no gradient while B is zero.
            let moved = tensor != before[&name];
            in_test(moved == name.contains("lora_B"), || format!("{name}: moved {moved}"))?;
        }
    }

    #[test]
    fn program_with_a_missing_instruction_is_refused(case in cases()) {
        let program = case.compile_train().program;
        in_test(verify(&program).is_ok(), || "the complete program is rejected".into())?;
        for i in 0..program.instrs.len() {
            // A program without an update is valid.
            if matches!(program.instrs[i].op, Op::Update(_)) {
                continue;
            }
            let mut broken = program.clone();
            let removed = broken.instrs.remove(i);
            in_test(verify(&broken).is_err(), || format!("accepted without {}", program.describe_instr(&removed)))?;
        }
    }
}

/// Moves the two documents of one row to the start of a row each, followed by padding without labels.
fn unpacked(data: &Data, seq_len: usize) -> Data {
    let second = data.doc_start.iter().position(|s| *s > 0).expect("a packed row has a second document");
    let mut out = Data::default();
    for document in [0..second, second..seq_len] {
        let n = document.len();
        let padding = || 0..(seq_len - n) as i32;
        out.ids.extend(data.ids[document.clone()].iter().copied().chain(padding().map(|_| 1)));
        out.labels.extend(data.labels[document.clone()].iter().copied().chain(padding().map(|_| -100)));
        let weights = data.loss_weights[document.clone()].iter().copied();
        out.loss_weights.extend(weights.chain(padding().map(|_| 1.0)));
        out.positions.extend(data.positions[document].iter().copied().chain(padding()));
        out.doc_start.extend((0..n).map(|_| 0).chain(padding().map(|_| n as i32)));
    }
    out
}

/// A case with every kind of instruction.
fn rich_case() -> Case {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    loop {
        let case = cases().new_tree(&mut runner).expect("cases are never exhausted").current();
        if case.lora.is_none() && case.n_microbatches > 1 && case.model.n_layers > 1 {
            return case;
        }
    }
}

/// The slope test must detect one backward product that is five percent too small.
#[test]
fn slope_test_detects_a_wrong_backward_product() {
    let case = rich_case();
    let products: Vec<usize> = {
        let program = case.compile_train().program;
        let backward = |i: &usize| program.instrs[*i].site.phase == Phase::Backward;
        let product = |i: &usize| matches!(program.instrs[*i].op, Op::MatMul(_));
        (0..program.instrs.len()).filter(backward).filter(product).collect()
    };
    assert!(products.len() > 20, "{} products", products.len());

    for i in products.into_iter().step_by(5) {
        let mut train = case.compile_train();
        let Op::MatMul(m) = &mut train.program.instrs[i].op else { unreachable!("chosen as a product") };
        m.alpha *= 0.95;
        let what = train.program.describe_instr(&train.program.instrs[i]);
        let (error, _) = slope_error(&case, &mut Bench::with_program(&case, train));
        assert!(error > 1.0, "not detected: {what}");
    }
}

/// The slope test must detect an operand of the right shape with another value.
#[test]
fn slope_test_detects_a_wrong_operand() {
    let case = rich_case();
    let mut train = case.compile_train();
    let program = &mut train.program;
    let (i, operand) = program
        .instrs
        .iter()
        .enumerate()
        .find_map(|(i, instr)| match instr.op {
            Op::AttentionBackward(_) => Some((i, instr.reads[2])),
            _ => None,
        })
        .expect("a decoder has attention");
    // The gradient of the output instead of the output.
    let dy: ValueId = program.instrs[i].reads[4];
    assert_eq!(program.value(operand).shape, program.value(dy).shape);
    program.instrs[i].reads[2] = dy;

    let (error, what) = slope_error(&case, &mut Bench::with_program(&case, train));

    assert!(error > 1.0, "{what}");
}
