//! `phalanx push`, and the upload at the end of a job with `hub_model_id`.

use super::{conclude, conclude_json};
use crate::config::output::OutputSection;
use crate::console::Console;
use crate::error::JobError;
use crate::error::command::CommandError;
use crate::shell::quoted;
use crate::train::progress::Transferring;
use crate::units::human_bytes;
use phalanx_storage::hub::fetch::Hub;
use phalanx_storage::hub::name::{MAIN, RepoName};
use phalanx_storage::hub::push::{Push, Pushed};
use std::path::PathBuf;

pub(super) const HELP: &str = "Examples:
  phalanx push outputs/model me/my-model              a trained model or adapter
  phalanx push outputs/model me/my-model --private    seen by its owner only
  phalanx train my.yaml --hub_model_id me/my-model    at the end of a run

All files of the folder become one commit; links and names that begin with a
dot are left out, and files that only the Hub has stay. The model is created if
it is not there. What the Hub has is not uploaded again, so an interrupted
upload is continued by the same command. HF_TOKEN, or the token that
`hf auth login` has stored, must be allowed to write; HF_ENDPOINT is another
server that speaks the Hub's protocol.";

#[derive(Debug, clap::Args)]
pub(super) struct Args {
    /// Folder of a model or an adapter.
    folder: PathBuf,
    /// Name of the model on the Hub, such as me/my-model.
    name: String,
    /// Create it so that only its owner sees it.
    #[arg(long)]
    private: bool,
    /// An existing branch.
    #[arg(long, default_value = MAIN)]
    revision: String,
    /// What the commit is about.
    #[arg(long, default_value = "Upload of a model", hide_default_value = true)]
    message: String,
    /// Print the result as JSON.
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &Args, console: &Console) -> Result<(), JobError> {
    let name = RepoName::parse(&args.name).ok_or_else(|| CommandError::NoHubName { name: args.name.clone() })?;
    if !["config.json", "adapter_config.json"].iter().any(|file| args.folder.join(file).is_file()) {
        return Err(CommandError::NothingToPush { dir: args.folder.clone() }.into());
    }
    let hub = Hub::of_user();
    hub.create(&name, &args.revision, args.private)?;
    let (folder, revision, message) = (args.folder.clone(), args.revision.clone(), args.message.clone());
    let pushed = push(&hub, &Push { name: name.clone(), revision, folder, message }, console)?;
    if args.json {
        let Pushed { commit, n_files, total_bytes, known_bytes } = pushed;
        let name = name.as_str();
        let json = serde_json::json!({ "name": name, "commit": commit, "files": n_files, "bytes": total_bytes, "known_bytes": known_bytes });
        conclude_json(console, &json, true);
    } else {
        conclude(console, format_args!("{}", sentence(&name, &pushed)));
    }
    Ok(())
}

/// The upload at the end of a job, if it asks for one, and `is_here`: one machine of a job uploads, and the others need no token.
pub(super) struct Upload<'a>(Option<(&'a OutputSection, &'a RepoName)>);

/// Creates the model of a job on the Hub, so that a run does not train for days for a name or token that the Hub refuses.
pub(super) fn prepare(output: &OutputSection, is_here: bool) -> Result<Upload<'_>, JobError> {
    let Some(name) = output.hub_model_id.as_ref().filter(|_| is_here) else { return Ok(Upload(None)) };
    Hub::of_user().create(name, &output.hub_revision, output.hub_private_repo)?;
    Ok(Upload(Some((output, name))))
}

impl Upload<'_> {
    /// Uploads the model, once the job is finished after this many steps.
    pub(super) fn after(&self, finished: Option<u64>, console: &Console) -> Result<(), JobError> {
        let (Some((output, name)), Some(n_steps)) = (self.0, finished) else { return Ok(()) };
        let folder = output.folder().join("model");
        let revision = Some(&output.hub_revision).filter(|revision| *revision != MAIN);
        let revision = revision.map(|revision| format!(" --revision {revision}")).unwrap_or_default();
        let command = format!("phalanx push {} {name}{revision}", quoted(&folder));
        if !folder.is_dir() {
            console.say(format_args!("{} is on another machine; upload it there with:  {command}", folder.display()));
            return Ok(());
        }
        let (name, revision) = (name.clone(), output.hub_revision.clone());
        let what = Push { name, revision, folder, message: format!("Trained to step {n_steps}") };
        match push(&Hub::of_user(), &what, console) {
            Ok(pushed) => {
                console.say(sentence(&what.name, &pushed));
                Ok(())
            }
            Err(error) => {
                console.say(format_args!("the model is not on the Hub; try again with:  {command}"));
                Err(error)
            }
        }
    }
}

fn push(hub: &Hub, what: &Push, console: &Console) -> Result<Pushed, JobError> {
    let mut transferring = Transferring::new(console, what.name.as_str());
    let pushed = hub.push(what, &mut |progress| transferring.see(progress));
    transferring.finish();
    Ok(pushed?)
}

fn sentence(name: &RepoName, pushed: &Pushed) -> String {
    let Pushed { commit, n_files, total_bytes, known_bytes } = pushed;
    let known = match known_bytes {
        0 => String::new(),
        n => format!(" ({} were there already)", human_bytes(*n)),
    };
    format!("{name}: {n_files} files, {}{known}, as {commit}", human_bytes(*total_bytes))
}
