//! `phalanx serve`.

use super::chat::template_source;
use super::model_args::ModelArgs;
use super::report_note;
use super::signals::on_signal;
use crate::api::generate::with_model;
use crate::api::sampling::Sampling;
use crate::api::scores::with_scorer_on;
use crate::config::precision::DeviceChoice;
use crate::console::Console;
use crate::data::end_of_turn;
use crate::data::tokenizer::Tokenizer;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::error::generate::GenerateError;
use crate::serve::{Served, Settings, Stop, Templates, serve};
use phalanx_strategies::model::Output;
use std::io::Read;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(super) const HELP: &str = "Examples:
  phalanx serve outputs/model
  phalanx serve outputs/adapter --listen 127.0.0.1:8080 --max-len 8192
  phalanx serve outputs/model --listen 0.0.0.0:8000 --api-key-file key.txt
  phalanx serve outputs/reward-model                 # scores; see /classify

Requests are answered one after the other:
  curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
    -d '{\"messages\": [{\"role\": \"user\", \"content\": \"Hello\"}]}'
  lm_eval --model local-completions --tasks arc_easy --model_args \\
    model=outputs/model,base_url=http://localhost:8000/v1/completions";

/// Fewest characters of a key.
const KEY_LEN_MIN: usize = 16;
/// Most bytes of its file.
const KEY_BYTES_MAX: u64 = 4096;

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    #[command(flatten)]
    model: ModelArgs,
    /// Address and port; other addresses than those of this machine alone need a key.
    #[arg(long, default_value = "127.0.0.1:8000", value_name = "ADDRESS:PORT")]
    listen: SocketAddr,
    /// Address alone, as other servers take it; `localhost` or numbers.
    #[arg(long, value_name = "ADDRESS", value_parser = address, conflicts_with = "listen")]
    host: Option<IpAddr>,
    /// Port alone, as other servers take it.
    #[arg(long, conflicts_with = "listen")]
    port: Option<u16>,
    /// File with the key that requests have to send; at least 16 characters.
    #[arg(long, value_name = "FILE")]
    api_key_file: Option<PathBuf>,
    /// Name of the model in requests and answers [default: the directory as given].
    #[arg(long)]
    name: Option<String>,
    /// Maximum number of tokens of a prompt and its continuation.
    #[arg(long, alias = "max_len", default_value = "4096")]
    max_len: NonZeroUsize,
    /// Maximum number of requests that wait while one is answered; further ones get status 429.
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..))]
    queue: u16,
    /// Name or file of a chat template [default: that of the tokenizer].
    #[arg(long, alias = "chat_template", value_name = "TEMPLATE")]
    chat_template: Option<String>,
}

pub(super) fn run(args: &Args, console: &Console) -> Result<(), JobError> {
    let key = args.api_key_file.as_deref().map(read_key).transpose()?;
    let address = SocketAddr::new(args.host.unwrap_or(args.listen.ip()), args.port.unwrap_or(args.listen.port()));
    if key.is_none() && !address.ip().is_loopback() {
        return Err(CommandError::OpenToAll { address }.into());
    }
    let source = args.model.source()?;
    let tokenizer = source.tokenizer()?;
    tokenizer.notes().iter().for_each(|note| report_note(note));
    let templates = templates(&tokenizer, args.chat_template.as_deref())?;
    let name = args.name.clone().unwrap_or_else(|| args.model.model.display().to_string());
    let gives_scores = source.model()?.output == Output::Score;
    let generation = source.generation_config()?;
    let sampling = Sampling::of_api(&generation);
    let unfollowed = Sampling::unfollowed(&generation);
    unfollowed.iter().filter(|_| !gives_scores).for_each(|note| report_note(note));
    let settings = Settings { name, sampling, templates, key, queue_len: args.queue.into() };
    // Bound before the model is loaded, so that an address in use is reported at once.
    let listener = TcpListener::bind(address).map_err(|source| CommandError::Listen { address, source })?;
    let address = listener.local_addr().map_err(|source| CommandError::Listen { address, source })?;
    let stop = Arc::new(Stop::default());
    let of_signal = Arc::clone(&stop);
    on_signal(move || of_signal.stop(), || false)?;
    let (device, max_len, n_threads) = (DeviceChoice::Auto, args.max_len.get(), args.model.threads);
    let named = settings.name.clone();
    let say = |path: &str, longest: usize| {
        console.say(format_args!("{named} on http://{address}{path}, texts of at most {longest} tokens"));
    };
    if gives_scores {
        with_scorer_on(device, &source, max_len, n_threads, |scorer| {
            say("/classify", scorer.max_len());
            Ok(serve(Served::Scores(scorer), listener, settings, &stop)?)
        })?;
    } else {
        with_model(device, &source, max_len, n_threads, |generator| {
            say("/v1", generator.max_len());
            Ok(serve(Served::Texts(generator), listener, settings, &stop)?)
        })?;
    }
    console.say("stopped");
    Ok(())
}

fn address(text: &str) -> Result<IpAddr, String> {
    match text {
        "localhost" => Ok(Ipv4Addr::LOCALHOST.into()),
        text => text.parse().map_err(|_| "must be localhost or an IP address".into()),
    }
}

/// The templates of a name or file, or those of the tokenizer.
fn templates(tokenizer: &Tokenizer, wanted: Option<&str>) -> Result<Templates, JobError> {
    let plain = template_source(tokenizer, wanted)?;
    let with_tools = tokenizer.tool_template().filter(|_| wanted.is_none()).map(str::to_owned);
    let mut ends = Vec::new();
    for source in plain.iter().chain(&with_tools) {
        let template = tokenizer.parse_template(source).map_err(GenerateError::Template)?;
        ends.extend(end_of_turn::of_template(tokenizer, &template));
    }
    Ok(Templates { plain, with_tools, ends })
}

/// The key in a file.
fn read_key(path: &Path) -> Result<String, JobError> {
    let io = |source| JobError::Io { action: "read", path: path.to_owned(), source };
    let mut text = String::new();
    std::fs::File::open(path).map_err(io)?.take(KEY_BYTES_MAX).read_to_string(&mut text).map_err(io)?;
    let key = text.trim();
    if key.len() < KEY_LEN_MIN || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(CommandError::Key { path: path.to_owned(), least: KEY_LEN_MIN }.into());
    }
    Ok(key.to_owned())
}
