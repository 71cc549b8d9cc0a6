//! What a node trains on and with, as digests: its build, tokenizer, data sets and base model.
//!
//! Ranks that read other tokens or begin with other weights exchange gradients without an error, and train a model that nobody
//! has asked for.

use serde::{Deserialize, Serialize};

/// One input of a job, as a node has it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Input {
    /// What it is, e.g. `data set 0 (text.txt)`; at most [`INPUT_LEN_MAX`] bytes, as the value.
    pub name: String,
    /// Its digest, or its version.
    pub value: String,
}

/// Maximum number of inputs of a node.
pub const INPUTS_MAX: usize = 1024;
/// Maximum length of the name and of the value of an input, in bytes.
pub const INPUT_LEN_MAX: usize = 256;

/// Why `found` is not `expected`, from the first input in which they differ, as the end of a sentence about the owner of `found`.
pub fn difference(expected: &[Input], found: &[Input]) -> Option<String> {
    let of = |inputs: &[Input], name: &str| inputs.iter().find(|input| input.name == name).cloned();
    for Input { name, value } in expected {
        match of(found, name) {
            None => return Some(format!("has no {name}")),
            Some(other) if other.value != *value => {
                return Some(format!("has another {name}: {} instead of {value}", other.value));
            }
            Some(_) => {}
        }
    }
    let more = found.iter().find(|input| of(expected, &input.name).is_none())?;
    Some(format!("has a further {}", more.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inputs(all: &[(&str, &str)]) -> Vec<Input> {
        all.iter().map(|(name, value)| Input { name: (*name).into(), value: (*value).into() }).collect()
    }

    #[test]
    fn first_input_that_differs_is_named() {
        let job = inputs(&[("tokenizer", "aa"), ("data set 0 (a.txt)", "bb"), ("data set 1 (b.txt)", "cc")]);
        for (found, expected) in [
            (job.clone(), None),
            (
                inputs(&[("tokenizer", "aa"), ("data set 1 (b.txt)", "cc"), ("data set 0 (a.txt)", "bd")]),
                Some("has another data set 0 (a.txt): bd instead of bb"),
            ),
            (job[..2].to_vec(), Some("has no data set 1 (b.txt)")),
            ([&job[..], &inputs(&[("data set 2 (c.txt)", "dd")])].concat(), Some("has a further data set 2 (c.txt)")),
        ] {
            assert_eq!(difference(&job, &found).as_deref(), expected);
        }
    }
}
