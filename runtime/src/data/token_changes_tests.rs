//! Tokenizers with more tokens, other roles and other texts; compared with what the library and transformers do.

use super::*;
use crate::data::tokenizer::Tokenizer;

fn llama() -> Tokenizer {
    Tokenizer::from_dir(&phalanx_needs::reference("models/tiny-llama2")).unwrap()
}

fn roles(roles: &[(&'static str, &str)]) -> TokenChanges {
    TokenChanges {
        roles: roles.iter().map(|(role, text)| (*role, (*text).to_owned())).collect(),
        ..TokenChanges::default()
    }
}

fn reloaded(tokenizer: &Tokenizer) -> (tempfile::TempDir, Tokenizer) {
    let dir = tempfile::tempdir().unwrap();
    tokenizer.write_files(dir.path()).unwrap();
    let loaded = Tokenizer::from_dir(dir.path()).unwrap();
    (dir, loaded)
}

#[test]
fn new_tokens_get_the_next_ids_and_are_exported() {
    let changes = TokenChanges { tokens: vec!["<|a|>".into(), "the".into()], ..roles(&[("eos_token", "<|im_end|>")]) };

    let tokenizer = llama().changed(&changes).unwrap();

    let n_before = llama().vocab_size() as u32;
    assert_eq!(tokenizer.eos_id(), Some(n_before));
    assert_eq!(tokenizer.token_id("<|a|>"), Some(n_before + 1));
    assert_eq!(tokenizer.encode("<|a|><|im_end|>").unwrap(), [n_before + 1, n_before]);
    let (dir, loaded) = reloaded(&tokenizer);
    assert_eq!((loaded.eos_id(), loaded.vocab_size()), (tokenizer.eos_id(), tokenizer.vocab_size()));
    assert_eq!(loaded.fingerprint(), tokenizer.fingerprint());
    let library = tokenizers::Tokenizer::from_file(dir.path().join("tokenizer.json")).unwrap();
    assert_eq!(library.encode("<|im_end|>", false).unwrap().get_ids(), [n_before]);
}

#[test]
fn changes_that_are_made_already_leave_the_files_as_they_are() {
    let tokenizer = llama().changed(&roles(&[("eos_token", "</s>")])).unwrap();

    let files = |tokenizer: &Tokenizer| tokenizer.files().find(|(name, _)| name == "tokenizer.json").unwrap();
    assert_eq!(files(&tokenizer), files(&llama()));
    assert_eq!(tokenizer.fingerprint(), llama().fingerprint());
}

#[test]
fn texts_begin_with_the_new_beginning() {
    let tokenizer = llama().changed(&roles(&[("bos_token", "<|begin|>")])).unwrap();

    assert_eq!(tokenizer.document_start(), tokenizer.bos_id());
    let (dir, _) = reloaded(&tokenizer);
    let library = tokenizers::Tokenizer::from_file(dir.path().join("tokenizer.json")).unwrap();
    assert_eq!(library.encode("a", true).unwrap().get_ids()[0], tokenizer.bos_id().unwrap());
}

#[test]
fn reserved_token_gets_another_text_and_keeps_its_id() {
    let eos = llama().eos_id().unwrap();
    let changes = TokenChanges { texts: [(eos, "<|im_end|>".to_owned())].into(), ..TokenChanges::default() };

    let tokenizer = llama().changed(&changes).unwrap();

    assert_eq!((tokenizer.eos_id(), tokenizer.vocab_size()), (Some(eos), llama().vocab_size()));
    assert_eq!(tokenizer.token_text(eos).as_deref(), Some("<|im_end|>"));
    assert_eq!(tokenizer.encode("<|im_end|>").unwrap(), [eos]);
    let unknown = TokenChanges { texts: [(300, "x".to_owned())].into(), ..TokenChanges::default() };
    assert!(llama().changed(&unknown).unwrap_err().to_string().contains("names id 300"));
}

#[test]
fn chat_template_is_exported_with_the_tokenizer() {
    let changes = TokenChanges { chat_template: Some("{{ messages }}".into()), ..TokenChanges::default() };

    let (_dir, loaded) = reloaded(&llama().changed(&changes).unwrap());

    assert_eq!(loaded.chat_template(), Some("{{ messages }}"));
}

#[test]
fn byte_tokenizer_with_a_new_token_reads_texts_as_before() {
    let changes = TokenChanges { additional: vec!["<|x|>".into()], ..TokenChanges::default() };

    let tokenizer = Tokenizer::bytes().changed(&changes).unwrap();

    let n_before = Tokenizer::bytes().vocab_size() as u32;
    let expected = [Tokenizer::bytes().encode("é").unwrap(), vec![n_before]].concat();
    assert_eq!(tokenizer.encode("é<|x|>").unwrap(), expected);
    assert_eq!(tokenizer.eos_id(), Tokenizer::bytes().eos_id());
}
