//! `phalanx fetch`.

use super::{conclude, conclude_json};
use crate::config::JobConfig;
use crate::console::Console;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::train::progress::Transferring;
use crate::units::human_bytes;
use phalanx_storage::hub::fetch::{Fetched, Hub, Request};
use phalanx_storage::hub::name::{Kind, MAIN, RepoName};
use std::path::Path;

pub(super) const HELP: &str = "Examples:
  phalanx fetch HuggingFaceTB/SmolLM2-135M      a model and its tokenizer
  phalanx fetch --dataset tatsu-lab/alpaca      a data set
  phalanx fetch my.yaml                         what the job names

Files go to the cache of the Hub's own client (HF_HUB_CACHE, or hub in HF_HOME,
or ~/.cache/huggingface/hub), and a job then names them as here. Files that are
there are not downloaded again, and an interrupted download continues. Every
file is compared with the hash that the Hub gives for it. HF_TOKEN, or the
token that `hf auth login` has stored, opens private repositories; HF_ENDPOINT
is another server that speaks the Hub's protocol. With HF_HUB_OFFLINE=1, only
the cache is asked.";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Name of a model or data set on the Hub, or a job's YAML file.
    name: String,
    /// The name is that of a data set.
    #[arg(long)]
    dataset: bool,
    /// Branch, tag or commit.
    #[arg(long)]
    revision: Option<String>,
    /// Download all files of a model, also weights in formats that Phalanx does not read.
    #[arg(long)]
    all: bool,
    /// Print the result as JSON: a list with an entry for each model or data set.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args, console: &Console) -> Result<(), JobError> {
    let (hub, mut found) = (Hub::of_user(), Vec::new());
    for request in args.requests()? {
        let mut transferring = Transferring::new(console, request.name.as_str());
        let fetched = hub.fetch(&request, &mut |progress| transferring.see(progress))?;
        transferring.finish();
        let Fetched { snapshot, n_files, total_bytes, n_left_out } = fetched;
        if args.json {
            found.push(serde_json::json!({
                "name": request.name.as_str(),
                "files": n_files,
                "bytes": total_bytes,
                "path": snapshot,
                "left_out_files": n_left_out,
            }));
            continue;
        }
        let left_out = match n_left_out {
            0 => String::new(),
            n => format!("; {n} files in other formats are left out (--all downloads them)"),
        };
        let size = human_bytes(total_bytes);
        let offline = if hub.is_offline() { "; the Hub was not asked, because HF_HUB_OFFLINE is set" } else { "" };
        let name = &request.name;
        conclude(
            console,
            format_args!("{name}: {n_files} files, {size}, in {}{left_out}{offline}", snapshot.display()),
        );
    }
    if args.json {
        conclude_json(console, &found.into(), true);
    }
    Ok(())
}

impl Args {
    fn requests(&self) -> Result<Vec<Request>, JobError> {
        let path = Path::new(&self.name);
        let is_job = path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml");
        if is_job && path.is_file() {
            return Ok(self.of_job(&JobConfig::load(path, &[])?));
        }
        let kind = if self.dataset { Kind::Dataset } else { Kind::Model };
        let name = RepoName::parse(&self.name).ok_or_else(|| CommandError::NoHubName { name: self.name.clone() })?;
        Ok(vec![self.request(kind, name, self.revision.as_deref())])
    }

    fn request(&self, kind: Kind, name: RepoName, revision: Option<&str>) -> Request {
        Request { kind, name, revision: revision.unwrap_or(MAIN).to_owned(), all: self.all }
    }

    /// The model and the data sets of a job that are not paths.
    fn of_job(&self, job: &JobConfig) -> Vec<Request> {
        let name = |path: &Path| path.to_str().and_then(RepoName::parse).filter(|_| !path.exists());
        let mut requests = Vec::new();
        if let Some(model) = job.model.base_model.as_deref().and_then(name) {
            requests.push(self.request(Kind::Model, model, job.model.revision_of_model.as_deref()));
        }
        for dataset in job.data.datasets.iter().chain(&job.data.test_datasets) {
            if let Some(name) = name(&dataset.path) {
                let request = self.request(Kind::Dataset, name, dataset.revision.as_deref());
                if !requests.contains(&request) {
                    requests.push(request);
                }
            }
        }
        requests
    }
}
