//! TensorBoard event files: length-prefixed, checksummed protobuf records.
//!
//! Source: the TFRecord framing (`length, masked crc32c(length), data, masked crc32c(data)`) and the messages
//! `Event { wall_time = 1, step = 2, file_version = 3, summary = 5, session_log = 7 }`,
//! `Summary { value = 1 }`, `Value { tag = 1, simple_value = 2 }`, `SessionLog { status = 1 }`. Four messages do not justify a protobuf
//! compiler.

use crate::journal::{self, Journal};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Larger than any record, so that a step allocates nothing for its scalars.
const RECORD_BYTES: usize = 1 << 10;

/// Appends scalars to an event file.
#[derive(Debug)]
pub struct EventWriter {
    file: Journal,
    /// Buffers of the last record, which the next one reuses.
    message: Vec<u8>,
    summary: Vec<u8>,
    event: Vec<u8>,
    record: Vec<u8>,
}

impl EventWriter {
    /// Creates a new event file of a world in `dir`, which TensorBoard shows together with those already there, except for their
    /// scalars of steps after `resumed_step`.
    pub fn create(dir: &Path, generation: u64, resumed_step: u64) -> EventWriter {
        let now = wall_time();
        let name = format!("events.out.tfevents.{:010}.{}.g{generation}.phalanx", now as u64, std::process::id());
        let [message, summary, mut event, record] = [(); 4].map(|()| Vec::with_capacity(RECORD_BYTES));
        double(&mut event, 1, now);
        bytes(&mut event, 3, b"brain.Event:2");
        // What a file that replaces this one has stays.
        let file = Journal::new(dir.join(name), |path| Ok(Box::new(journal::open(path)?)));
        let mut writer = EventWriter { file, message, summary, event, record };
        writer.write();
        writer.restart_after(resumed_step);
        writer
    }

    /// Marks earlier scalars of later steps as those of a session that was interrupted.
    fn restart_after(&mut self, step: u64) {
        let event = &mut self.event;
        event.clear();
        double(event, 1, wall_time());
        key(event, 2, 0);
        varint(event, step + 1);
        // SessionLog { status: START }
        bytes(event, 7, &[1 << 3, 1]);
        self.write();
    }

    /// Why the file lacks scalars, as a sentence; `None` while it has all of them.
    pub fn fault(&self) -> Option<String> {
        self.file.fault()
    }

    /// The records that did not fit into memory while the file could not be written.
    pub fn n_dropped(&self) -> u64 {
        self.file.n_dropped()
    }

    /// Appends named scalars at a step.
    pub fn scalars(&mut self, step: u64, scalars: &[(&str, f64)]) {
        let EventWriter { message, summary, event, .. } = self;
        summary.clear();
        for (tag, value) in scalars {
            message.clear();
            bytes(message, 1, tag.as_bytes());
            key(message, 2, 5);
            message.extend((*value as f32).to_le_bytes());
            bytes(summary, 1, message);
        }
        event.clear();
        double(event, 1, wall_time());
        key(event, 2, 0);
        varint(event, step);
        bytes(event, 5, summary);
        self.write();
    }

    /// Appends the event as a record.
    fn write(&mut self) {
        let EventWriter { event, record, .. } = self;
        let length = (event.len() as u64).to_le_bytes();
        record.clear();
        record.extend(length);
        record.extend(masked_crc(&length).to_le_bytes());
        record.extend_from_slice(event);
        record.extend(masked_crc(event).to_le_bytes());
        self.file.append(record);
    }
}

fn wall_time() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// TFRecord stores checksums rotated and offset, so that a checksum of data that holds checksums is still good.
fn masked_crc(data: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

fn key(out: &mut Vec<u8>, field: u64, wire_type: u64) {
    varint(out, field << 3 | wire_type);
}

fn varint(out: &mut Vec<u8>, mut x: u64) {
    while x >= 0x80 {
        out.push(x as u8 | 0x80);
        x >>= 7;
    }
    out.push(x as u8);
}

fn double(out: &mut Vec<u8>, field: u64, x: f64) {
    key(out, field, 1);
    out.extend(x.to_le_bytes());
}

fn bytes(out: &mut Vec<u8>, field: u64, data: &[u8]) {
    key(out, field, 2);
    varint(out, data.len() as u64);
    out.extend(data);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_are_framed_with_masked_checksums() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::create(dir.path(), 1, 6);
        writer.scalars(300, &[("train/loss", 1.5)]);
        let path = std::fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        let data = std::fs::read(path).unwrap();

        let mut records = Vec::new();
        let mut rest = &data[..];
        while !rest.is_empty() {
            let n = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(masked_crc(&rest[..8]).to_le_bytes(), rest[8..12]);
            assert_eq!(masked_crc(&rest[12..12 + n]).to_le_bytes(), rest[12 + n..16 + n]);
            records.push(&rest[12..12 + n]);
            rest = &rest[16 + n..];
        }

        assert_eq!(records.len(), 3);
        assert!(records[0].ends_with(b"brain.Event:2"));
        // The session starts at step 7.
        assert_eq!(records[1][9..], [0x10, 7, 0x3a, 2, 8, 1]);
        // Step 300 as a varint, then the summary with its tag and 1.5f32.
        assert_eq!(records[2][9..12], [0x10, 0xac, 0x02]);
        assert!(records[2].windows(10).any(|w| w == b"train/loss"));
        assert!(records[2].ends_with(&1.5f32.to_le_bytes()));
    }

    #[test]
    fn mask_matches_the_tfrecord_format() {
        // CRC-32C of "123456789" is 0xe3069283 (RFC 3720, appendix B.4).
        assert_eq!(masked_crc(b"123456789"), 0xe306_9283u32.rotate_right(15).wrapping_add(0xa282_ead8));
    }
}
