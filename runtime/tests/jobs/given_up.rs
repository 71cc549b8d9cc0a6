//! Runs that begin again, or go back, in the folder of an earlier run.

use crate::support::Project;

#[test]
fn run_that_began_again_or_went_back_is_the_one_that_is_resumed_and_exported() {
    let p = Project::new();
    let constant = ["--lr_scheduler", "constant", "--save_total_limit", "none"];
    let train = |keys: &[&str]| p.train(&[&constant[..], keys].concat()).succeeds().stdout;
    train(&["--max_steps", "20"]);

    let anew = train(&["--max_steps", "10", "--learning_rate", "2e-3", "--resume_from_checkpoint", "none"]);
    let exported = p.run(&["export", "out", "anew"]).succeeds().stdout;
    let resumed = train(&["--max_steps", "15", "--learning_rate", "2e-3"]);

    assert!(anew.contains("does not continue from the newest checkpoint"), "{anew}");
    assert!(exported.contains("step-0000000010"), "{exported}");
    assert!(resumed.contains("resuming at step 10"), "{resumed}");
    assert!(resumed.contains("of a run that was given up do not count"), "{resumed}");

    let tenth = p.checkpoints("out").into_iter().rfind(|path| path.display().to_string().contains("0000000010.g"));
    let tenth = tenth.unwrap().display().to_string();
    train(&["--max_steps", "12", "--learning_rate", "1e-3", "--resume_from_checkpoint", &tenth]);
    let resumed = train(&["--max_steps", "13", "--learning_rate", "1e-3"]);

    assert!(resumed.contains("resuming at step 12"), "{resumed}");
}
