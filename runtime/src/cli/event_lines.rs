//! `phalanx train --events`: all events of a run as lines of JSON, for programs that start it.

use crate::console::printable_json;
use crate::events::{Event, Report};
use serde::Serialize;

/// The name of the event in front of its fields.
fn line<T: Serialize>(event: &'static str, fields: &T) -> Option<String> {
    let fields = serde_json::to_string(fields).ok()?;
    let fields = fields.strip_prefix('{')?;
    // Names and notes of others are in strings.
    Some(printable_json(&format!("{{\"event\":\"{event}\",{fields}")).into_owned())
}

/// The line of an event.
pub(super) fn of_event(event: &Event) -> Option<String> {
    match event {
        Event::Preparing { path, done_bytes, total_bytes } => {
            line("preparing", &serde_json::json!({"path": path, "done_bytes": done_bytes, "total_bytes": total_bytes}))
        }
        Event::Reference { done, total } => line("reference", &serde_json::json!({"done": done, "total": total})),
        Event::Started(started) => line("started", started),
        Event::Step(metrics) => line("step", metrics),
        Event::Eval(metrics) => line("eval", metrics),
        Event::Saved { step, path } => line("saved", &serde_json::json!({"step": step, "path": path})),
        Event::NotSaved { step, reason } => line("not_saved", &serde_json::json!({"step": step, "reason": reason})),
        Event::Note(text) => line("note", &serde_json::json!({"text": text})),
    }
}

/// The last line of a run that did not fail.
pub(super) fn of_end(report: &Report) -> Option<String> {
    line("ended", report)
}

/// The line of a measurement, as in `metrics.jsonl`; other events have none.
pub(super) fn of_measurement(event: &Event) -> Option<String> {
    match event {
        Event::Step(metrics) => serde_json::to_string(metrics).ok(),
        Event::Eval(metrics) => serde_json::to_string(metrics).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    #[test]
    fn event_is_named_beside_its_fields() {
        let lines = [
            of_event(&Event::Saved { step: 3, path: "out/checkpoints/a".into() }),
            of_event(&Event::Note("a rank died".into())),
            of_end(&Report {
                steps: 3,
                finished: true,
                last: None,
                checkpoint: None,
                model_dir: Some("out/model".into()),
            }),
        ];

        let lines: Vec<Value> =
            lines.iter().map(|line| serde_json::from_str(line.as_ref().unwrap()).unwrap()).collect();

        assert_eq!(lines[0], json!({"event": "saved", "step": 3, "path": "out/checkpoints/a"}));
        assert_eq!(lines[1], json!({"event": "note", "text": "a rank died"}));
        let end = json!({"event": "ended", "steps": 3, "finished": true, "last": null, "checkpoint": null, "model_dir": "out/model"});
        assert_eq!(lines[2], end);
    }
}
