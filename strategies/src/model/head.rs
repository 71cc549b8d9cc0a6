//! The head of a model: what it computes from the output of the last norm.

use super::output::{Hidden, Output};
use super::{Family, ForwardBuilder, HfConfig, ModelConfig, ModelError, Tensor};
use crate::program::formula::Expr;
use crate::program::{Column, Hyper, Init, Program};

/// The end of the class names of classifiers in transformers.
const CLASSIFIER: &str = "ForSequenceClassification";

impl Output {
    /// What the model of a `config.json` gives.
    ///
    /// # Errors
    /// When it is a classifier of several labels.
    pub(super) fn of(hf: &HfConfig, family: &Family) -> Result<Output, ModelError> {
        let class = hf.texts("architectures")?.and_then(|names| names.first().copied());
        if class != Some(&family.classifier()) {
            return Ok(Output::Logits);
        }
        // transformers takes two labels where none are named.
        match hf.len("id2label")?.or(hf.size("num_labels")?).unwrap_or(2) {
            1 => Ok(Output::Score),
            n => Err(ModelError::value("id2label", format!("{n} labels"), "a model of scores has one label")),
        }
    }
}

impl Family {
    /// Its class name of models that give a score.
    pub fn classifier(&self) -> String {
        let heads = ["ForCausalLM", "LMHeadModel"];
        let name = heads.iter().find_map(|head| self.architecture.strip_suffix(head)).unwrap_or(self.architecture);
        format!("{name}{CLASSIFIER}")
    }
}

/// The weight of the head that gives scores, `[1, C]`, by its name in model files.
pub const SCORE: &str = "score.weight";

impl ModelConfig {
    /// Appends the forward pass up to the logits, `[N, V]`. A second pass has the same parameters.
    pub fn logits(&self, b: &mut ForwardBuilder) -> Tensor {
        let Hidden { states, table } = (self.family.hidden)(self, b);
        let shape = [self.vocab_size, self.hidden_size];
        let weight = if self.tie_embeddings { table } else { b.param("lm_head.weight", &shape, self.head_init()) };
        let logits = b.linear(states, weight, None);
        b.scale(logits, self.multipliers.logits)
    }

    /// Appends the forward pass up to the scores, `[N, 1]`.
    pub fn scores(&self, b: &mut ForwardBuilder) -> Tensor {
        let Hidden { states, .. } = (self.family.hidden)(self, b);
        let weight = b.param(SCORE, &[1, self.hidden_size], self.head_init());
        b.linear(states, weight, None)
    }

    /// Numbers that the head gives for a token.
    pub const fn n_outputs(&self) -> usize {
        match self.output {
            Output::Logits => self.vocab_size,
            Output::Score => 1,
        }
    }

    fn head_init(&self) -> Init {
        Init::Normal { std: self.init_std }
    }

    /// A loss where only its parameters matter: a model of scores has no likelihood of texts.
    pub(super) fn squared_scores(&self, mut b: ForwardBuilder) -> Program {
        let scores = self.scores(&mut b);
        let rows = b.row_sums(scores, Column::LastId);
        b.finish_formulas(&[(Expr::sum(0, 0).squared(), Hyper::LOSS_GRAD_SCALE)], &[], (&[rows], None), 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{BatchShape, FAMILIES, Head};

    fn parse(keys: &str) -> Result<ModelConfig, ModelError> {
        let json = format!(
            r#"{{"model_type": "llama", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32,
            "num_hidden_layers": 1, "num_attention_heads": 2{keys}}}"#
        );
        ModelConfig::try_from(&serde_json::from_str::<HfConfig>(&json).unwrap())
    }

    const CLASS: &str = r#", "architectures": ["LlamaForSequenceClassification"]"#;

    #[test]
    fn classifier_of_one_label_gives_a_score_and_has_no_other_head() {
        let model = parse(&format!(r#"{CLASS}, "id2label": {{"0": "LABEL_0"}}"#)).unwrap();

        let program = model.forward(BatchShape { n_rows: 1, seq_len: 4 }, Head::Loss).unwrap();

        let names: Vec<&str> = program.params.iter().map(|p| p.parts[0].name.as_str()).collect();
        assert_eq!((model.output, names.last()), (Output::Score, Some(&SCORE)));
        assert!(!names.contains(&"lm_head.weight"), "{names:?}");
        assert_eq!(parse("").unwrap().output, Output::Logits);
    }

    #[test]
    fn classifier_of_several_labels_is_refused() {
        for keys in ["", r#", "num_labels": 3"#, r#", "id2label": {"0": "bad", "1": "good"}"#] {
            let refused = parse(&format!("{CLASS}{keys}")).unwrap_err().to_string();

            assert!(refused.contains("a model of scores has one label"), "{refused}");
        }
    }

    #[test]
    fn every_family_has_a_class_of_scores_of_its_own() {
        let names: Vec<String> = FAMILIES.iter().map(|family| family.classifier()).collect();

        assert!(names.iter().all(|name| name.ends_with(CLASSIFIER)), "{names:?}");
        assert!(names.contains(&"GPT2ForSequenceClassification".to_owned()), "{names:?}");
    }
}
