use super::*;
use crate::pipeline::ScheduleKind;
use crate::plan::bound::MeshBound;
use std::collections::BTreeSet;
use std::time::Instant;

fn options(world_size: usize) -> Options {
    Options { world_size, micro_batch_max: 8, n_keep: 10, n_evaluate_max: 200 }
}

/// A made-up evaluation above the bound that depends on the candidate alone.
fn pretended(candidate: &Candidate, workload: &Workload) -> Result<Evaluation, Reason> {
    let bound = MeshBound::new(candidate.mesh, workload, &h100()).of(candidate);
    let m = candidate.mesh;
    let spread = (m.pp * 7 + m.dp_shard * 5 + m.cp * 3 + m.tp * 11 + candidate.micro_batch_size * 13) % 17;
    let step_seconds = bound.step_seconds * (1.0 + spread as f64 / 40.0);
    if spread == 4 {
        return Err(Reason::Refused { why: "spread of 4".into() });
    }
    Ok(Evaluation { step_seconds, memory_bytes: bound.memory_bytes, exposed_seconds: 0.0 })
}

#[test]
fn meshes_are_all_factorisations() {
    let meshes = MeshSizes::all(4096);

    // 12 factors of two on 5 axes: 16 over 4.
    assert_eq!(meshes.len(), 1820);
    assert_eq!(meshes.iter().collect::<BTreeSet<_>>().len(), 1820);
    assert!(meshes.iter().all(|m| m.world_size() == 4096));
}

#[test]
fn search_finds_the_same_plan_as_exhaustive_search() {
    let (workload, hardware) = (small(96), h100());
    let options = Options { n_evaluate_max: usize::MAX, n_keep: 5, ..options(24) };
    let keep_all = Options { n_keep: usize::MAX, ..options };

    let plan = search(&workload, &hardware, &options, |c| pretended(c, &workload));
    let all = search(&workload, &hardware, &keep_all, |c| pretended(c, &workload));

    let seconds = |plan: &Plan| plan.ranked.iter().take(5).map(|r| r.evaluation.step_seconds).collect::<Vec<_>>();
    assert_eq!(seconds(&plan), seconds(&all));
    assert!(plan.n_evaluated * 2 < all.n_evaluated, "{} of {}", plan.n_evaluated, all.n_evaluated);
}

#[test]
fn every_candidate_is_ranked_or_refused() {
    let (workload, hardware) = (llama_70b(512), h100());

    let plan = search(&workload, &hardware, &options(256), |c| pretended(c, &workload));

    let refused = plan.refused.iter().filter(|r| r.example.is_some()).map(|r| r.n_candidates).sum::<usize>();
    assert_eq!(plan.ranked.len() + refused, plan.n_candidates);
    let meshes = plan.refused.iter().filter(|r| r.example.is_none()).count();
    let tried: BTreeSet<MeshSizes> = plan.refused.iter().filter(|r| r.example.is_some()).map(|r| r.mesh).collect();
    assert_eq!(meshes + tried.len(), MeshSizes::all(256).len());
    assert!(plan.ranked.is_sorted_by_key(|r| r.evaluation.step_seconds));
}

#[test]
fn plan_of_a_model_that_fits_nowhere_reports_the_closest_candidate() {
    let plan = search(&llama_70b(8), &h100(), &options(8), |c| pretended(c, &llama_70b(8)));

    assert!(plan.ranked.is_empty());
    let (n, reason) = plan.summary()["does not fit in memory"];
    assert!(n > 0);
    let Reason::Memory { needed, available } = *reason else { panic!("{reason}") };
    assert!(needed < 150_000_000_000 && available == 80_000_000_000, "not the closest candidate: {reason}");
}

#[test]
fn evaluation_that_does_not_fit_is_refused() {
    let workload = small(8);
    let too_big =
        |_: &Candidate| Ok(Evaluation { step_seconds: 1.0, memory_bytes: 90_000_000_000, exposed_seconds: 0.0 });

    let plan = search(&workload, &h100(), &options(1), too_big);

    let reason = plan.refused.iter().find(|r| matches!(r.reason, Reason::Memory { .. })).unwrap().reason.to_string();
    assert_eq!(reason, "needs 83.8 of 74.5 GiB, 9.3 GiB too much");
}

#[test]
fn reasons_name_the_numbers_that_do_not_fit() {
    let (workload, hardware) = (small(12), h100());
    let why = |mesh: MeshSizes| mesh.fits(&workload, &hardware).unwrap_err().to_string();
    let one = MeshSizes { pp: 1, dp_replicate: 1, dp_shard: 1, cp: 1, tp: 1 };

    assert_eq!(why(MeshSizes { tp: 8, ..one }), "12 attention heads do not divide by tp = 8");
    assert_eq!(why(MeshSizes { tp: 12, ..one }), "tp = 12 would sum activations between nodes of 8 devices");
    assert_eq!(why(MeshSizes { cp: 3, ..one }), "rows of 1024 tokens do not divide into 2 x cp = 6 chunks");
    assert_eq!(why(MeshSizes { pp: 13, ..one }), "13 pipeline parts are more than 12 layers");
    let eight = MeshSizes { dp_shard: 4, dp_replicate: 2, ..one };
    assert_eq!(why(eight), "a global batch of 12 rows does not divide among 8 replicas in microbatches of 1");
    let grouped = Workload { n_heads: 24, n_kv_heads: 6, ..workload };
    let why = MeshSizes { tp: 4, ..one }.fits(&grouped, &hardware).unwrap_err().to_string();
    assert_eq!(why, "6 key/value heads can be neither divided by tp = 4 nor repeated evenly");
}

#[test]
fn plan_report_gives_its_reasons_as_sentences() {
    let workload = small(8);

    let plan = search(&workload, &h100(), &options(1), |c| pretended(c, &workload));
    let written = serde_json::to_value(&plan).unwrap();

    assert_eq!(written["ranked"][0]["candidate"]["zero"], "0");
    assert_eq!(written["ranked"][0]["candidate"]["mesh"]["pp"], 1);
    let reasons: Vec<&str> =
        written["refused"].as_array().unwrap().iter().filter_map(|r| r["reason"].as_str()).collect();
    assert!(reasons.iter().all(|r| r.starts_with("takes at least ")) && !reasons.is_empty(), "{reasons:?}");
}

#[test]
fn key_value_heads_may_be_repeated() {
    let one = MeshSizes { pp: 1, dp_replicate: 1, dp_shard: 1, cp: 1, tp: 8 };
    let grouped = Workload { n_kv_heads: 4, ..llama_70b(1) };

    assert_eq!(one.fits(&grouped, &h100()), Ok(()));
}

#[test]
fn schedules_are_tried_only_where_they_can_gain() {
    let (workload, hardware) = (llama_70b(64), Hardware { memory_bytes: u64::MAX, ..h100() });
    let keep_all = Options { n_keep: usize::MAX, n_evaluate_max: usize::MAX, ..options(64) };

    let plan = search(&workload, &hardware, &keep_all, |c| pretended(c, &workload));

    let with = |f: &dyn Fn(&Candidate) -> bool| plan.ranked.iter().filter(|r| f(&r.candidate)).count();
    assert_eq!(with(&|c| c.mesh.pp == 1 && c.schedule != ScheduleKind::OneF1B), 0);
    assert_eq!(with(&|c| c.schedule == ScheduleKind::GPipe), 0);
    assert_eq!(with(&|c| c.schedule.n_chunks() > 1 && c.n_microbatches < c.mesh.pp), 0);
    assert!(with(&|c| c.schedule == ScheduleKind::ZeroBubble) > 0);
}

#[test]
fn four_thousand_ranks_are_planned_in_seconds() {
    let began = Instant::now();
    let workload = llama_70b(2048);

    let plan = search(&workload, &h100(), &options(4096), |c| pretended(c, &workload));

    assert_eq!(plan.ranked.len(), 10);
    let seconds = began.elapsed().as_secs_f64();
    assert!(seconds < 5.0, "took {seconds} s");
}

#[test]
fn fitting_candidate_is_found_although_memory_bounds_are_low() {
    let workload = llama_70b(512);
    let low = |c: &Candidate| pretended(c, &workload).map(|e| Evaluation { memory_bytes: e.memory_bytes * 3 / 2, ..e });
    let few = Options { n_evaluate_max: 40, ..options(128) };

    let plan = search(&workload, &h100(), &few, low);

    assert_eq!(plan.ranked.len(), 10, "of {} that were evaluated", plan.n_evaluated);
    let refused = plan.refused.iter().filter(|r| r.example.is_some()).map(|r| r.n_candidates).sum::<usize>();
    assert_eq!(plan.ranked.len() + refused, plan.n_candidates);
}
