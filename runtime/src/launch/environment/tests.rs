//! Launch contexts from the variables of launchers, and invalid variables.

use super::*;
use proptest::prelude::*;

fn variables(text: &str) -> Variables {
    text.split_whitespace().filter_map(|word| word.split_once('=')).map(|(k, v)| (k.into(), v.into())).collect()
}

const SLURM: &str = "SLURM_JOB_ID=77 SLURM_STEP_ID=0 SLURM_NNODES=4 SLURM_NODEID=2 SLURM_PROCID=2 SLURM_LOCALID=0 \
                     SLURM_JOB_NODELIST=gpu[03-05,11] SLURM_NTASKS=4 SLURM_CPUS_PER_TASK=16 SLURM_GPUS_ON_NODE=8";
const TORCHRUN: &str = "MASTER_ADDR=head MASTER_PORT=29500 WORLD_SIZE=8 RANK=4 LOCAL_WORLD_SIZE=4 LOCAL_RANK=0 \
                        GROUP_RANK=1 GROUP_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=none";

/// The variables of `text`, with another value for `name`; an empty value counts as missing.
fn with(text: &str, name: &str, value: &str) -> Variables {
    let mut variables = variables(text);
    variables.insert(name.into(), value.into());
    variables
}

#[test]
fn slurm_variables_give_the_launch_context_of_a_task() {
    let expected = LaunchContext {
        launch: "slurm-77.0.0".into(),
        node: 2,
        n_nodes: 4,
        is_first: true,
        head: "gpu03".into(),
        port: None,
        n_ranks: None,
        n_gpus: Some(8),
        n_cpus: Some(16),
    };

    assert_eq!(slurm(&variables(SLURM)), Ok(expected));
}

#[test]
fn step_on_a_part_of_its_allocation_counts_its_own_nodes() {
    let part = format!("{SLURM} SLURM_STEP_NUM_NODES=3 SLURM_STEP_NODELIST=gpu[04-05,11] SLURM_STEP_NUM_TASKS=3");

    let launch_context = slurm(&variables(&part)).unwrap();

    assert_eq!((launch_context.node, launch_context.n_nodes, &*launch_context.head), (2, 3, "gpu04"));
}

#[test]
fn requeued_slurm_job_is_another_launch() {
    let again = slurm(&with(SLURM, "SLURM_RESTART_COUNT", "1")).unwrap();

    assert_ne!(again.launch, slurm(&variables(SLURM)).unwrap().launch);
}

#[test]
fn torchrun_variables_give_the_launch_context_of_a_process() {
    let expected = LaunchContext {
        launch: "torchrun-29500-8-none".into(),
        node: 1,
        n_nodes: 2,
        is_first: true,
        head: "head".into(),
        port: Some(29500),
        n_ranks: Some(4),
        n_gpus: None,
        n_cpus: None,
    };

    assert_eq!(torchrun(&variables(TORCHRUN)), Ok(expected.clone()));
    let mut third = with(TORCHRUN, "RANK", "6");
    third.insert("LOCAL_RANK".into(), "2".into());
    assert_eq!(torchrun(&third), Ok(LaunchContext { is_first: false, ..expected }));
}

#[test]
fn machines_that_name_the_first_one_otherwise_are_of_one_launch() {
    let of = |head: &str| torchrun(&with(TORCHRUN, "MASTER_ADDR", head)).unwrap().launch;

    assert_eq!(of("localhost"), of("job-master-0"));
    assert_ne!(of("localhost"), torchrun(&with(TORCHRUN, "MASTER_PORT", "29501")).unwrap().launch);
}

#[test]
fn torchrun_variables_count_machines_without_local_world_size() {
    let launch_context = torchrun(&variables("MASTER_ADDR=10.0.0.1 MASTER_PORT=29500 WORLD_SIZE=3 RANK=2")).unwrap();

    assert_eq!(
        (launch_context.node, launch_context.n_nodes, launch_context.n_ranks, launch_context.is_first),
        (2, 3, None, true)
    );
}

type Parse = fn(&Variables) -> Result<LaunchContext, EnvironmentError>;

#[test]
fn invalid_variable_is_named_in_the_error() {
    let wrong: [(Parse, &str, &str, &str, &str); 14] = [
        (slurm, SLURM, "SLURM_JOB_ID", "", "SLURM_JOB_ID is not set; inside an allocation, `srun"),
        (slurm, SLURM, "SLURM_STEP_ID", "", "SLURM_STEP_ID is not set"),
        (
            slurm,
            SLURM,
            "SLURM_NODEID",
            "4",
            "SLURM_NODEID=4 and SLURM_NNODES=4 contradict each other: nodes are counted",
        ),
        (slurm, SLURM, "SLURM_NODEID", "two", "SLURM_NODEID is `two`, but must be a whole number of at least 0"),
        (slurm, SLURM, "SLURM_NNODES", "0", "SLURM_NNODES is `0`, but must be a whole number of at least 1"),
        (slurm, SLURM, "SLURM_NNODES", "5", "SLURM_JOB_NODELIST=gpu[03-05,11] and SLURM_NNODES=5"),
        (slurm, SLURM, "SLURM_JOB_NODELIST", "gpu[03-", "SLURM_JOB_NODELIST: `gpu[03-` has an unmatched bracket"),
        (slurm, SLURM, "SLURM_NTASKS", "32", "srun --ntasks-per-node=1"),
        (torchrun, TORCHRUN, "MASTER_ADDR", "", "MASTER_ADDR is not set; `--torchrun` needs"),
        (torchrun, TORCHRUN, "MASTER_PORT", "99999", "MASTER_PORT is `99999`, but must be a port"),
        (torchrun, TORCHRUN, "RANK", "8", "RANK=8 and WORLD_SIZE=8 contradict each other"),
        (torchrun, TORCHRUN, "LOCAL_WORLD_SIZE", "3", "LOCAL_WORLD_SIZE=3 and WORLD_SIZE=8 contradict"),
        (torchrun, TORCHRUN, "GROUP_RANK", "0", "GROUP_RANK=0 and RANK=4 contradict each other"),
        (torchrun, TORCHRUN, "LOCAL_RANK", "1", "LOCAL_RANK=1 and RANK=4 contradict each other"),
    ];

    for (parse, text, name, value, says) in wrong {
        let error = parse(&with(text, name, value)).unwrap_err().to_string();
        assert!(error.contains(says), "{name}={value}: {error}");
    }
}

proptest! {
    #[test]
    fn torchrun_variables_select_one_leading_process_per_machine(n_nodes in 1..6u32, n_each in 1..6u32) {
        let world = n_nodes * n_each;
        let launch_context = |rank: u32| {
            let text = format!(
                "MASTER_ADDR=a MASTER_PORT=1 WORLD_SIZE={world} RANK={rank} LOCAL_WORLD_SIZE={n_each} LOCAL_RANK={}",
                rank % n_each
            );
            torchrun(&variables(&text)).unwrap()
        };

        let contexts: Vec<LaunchContext> = (0..world).map(launch_context).collect();

        let first_nodes: Vec<u32> = contexts.iter().filter(|context| context.is_first).map(|context| context.node).collect();
        prop_assert_eq!(first_nodes, (0..n_nodes).collect::<Vec<_>>());
        prop_assert!(contexts.iter().all(|p| (p.n_nodes, &p.launch) == (n_nodes, &contexts[0].launch)));
    }

    #[test]
    fn no_values_panic(values in proptest::collection::vec("(-?[0-9]{0,12}|[a-z\\[\\],-]{0,6})", 9)) {
        let names = |text| variables(text).into_keys();
        for text in [SLURM, TORCHRUN] {
            let mixed: Variables = names(text).zip(values.iter().cloned()).collect();
            for launch_context in [slurm(&mixed), torchrun(&mixed)].into_iter().flatten() {
                prop_assert!(launch_context.node < launch_context.n_nodes);
            }
        }
    }
}
