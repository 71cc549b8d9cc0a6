//! A timeline as JSON for `chrome://tracing` and Perfetto: a process for each rank, a thread for each of its streams.
//!
//! Source: the Trace Event Format of the Chromium project; complete events (`"ph": "X"`), times in microseconds.

use super::Rank;
use super::span::{Span, What};
use std::fmt::{self, Display, Formatter};

/// The spans of one rank in a step.
#[derive(Clone, Copy, Debug)]
pub struct Track<'a> {
    /// The rank.
    pub rank: Rank,
    /// Its spans; empty unless the simulation was asked for them.
    pub spans: &'a [Span],
}

/// A whole file of tracks, each a [`Track`] or the text of one.
pub fn document(tracks: impl IntoIterator<Item = impl Display>) -> String {
    let tracks: Vec<String> = tracks.into_iter().map(|track| track.to_string()).collect();
    format!(r#"{{"displayTimeUnit":"ms","traceEvents":[{}]}}"#, tracks.join(","))
}

const COMPUTE: u32 = 0;
const COMMUNICATION: u32 = 1;

impl Display for Track<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let rank = self.rank;
        write!(f, r#"{{"ph":"M","pid":{rank},"name":"process_name","args":{{"name":"rank {rank}"}}}}"#)?;
        for (tid, name) in [(COMPUTE, "compute"), (COMMUNICATION, "communication")] {
            write!(f, r#",{{"ph":"M","pid":{rank},"tid":{tid},"name":"thread_name","args":{{"name":"{name}"}}}}"#)?;
        }
        self.spans.iter().try_for_each(|span| write_span(f, rank, span))
    }
}

fn write_span(f: &mut Formatter<'_>, rank: Rank, span: &Span) -> fmt::Result {
    let micros = |ns: u128| ns as f64 / 1e3;
    let (start, length) = (micros(span.start.as_nanos()), micros((span.end - span.start).as_nanos()));
    write!(f, r#",{{"ph":"X","pid":{rank},"ts":{start},"dur":{length},"#)?;
    match span.what {
        What::Compute { name, microbatch } => {
            write!(f, r#""tid":{COMPUTE},"name":"{}""#, Escaped(name))?;
            match microbatch {
                Some(microbatch) => write!(f, r#","args":{{"microbatch":{microbatch}}}}}"#),
                None => f.write_str("}"),
            }
        }
        What::Collective { collective, n_members, size_bytes } => {
            let (name, sequence) = (collective.kind.name(), collective.sequence);
            write!(f, r#""tid":{COMMUNICATION},"name":"{name}","args":"#)?;
            write!(f, r#"{{"members":{n_members},"sequence":{sequence},"bytes":{size_bytes}}}}}"#)
        }
    }
}

/// The inside of a JSON string.
struct Escaped<'a>(&'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '"' | '\\' => write!(f, "\\{c}"),
            c if c.is_control() => write!(f, "\\u{:04x}", u32::from(c)),
            c => write!(f, "{c}"),
        })
    }
}
