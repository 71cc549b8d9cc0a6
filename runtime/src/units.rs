//! Human-readable numbers.

use std::time::Duration;

/// `1.50 GiB`.
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let exponent = (bytes.max(1).ilog2() / 10).min(4);
    let scaled = bytes as f64 / f64::from(1u32 << 10).powi(exponent as i32);
    if exponent == 0 { format!("{bytes} B") } else { format!("{scaled:.2} {}", UNITS[exponent as usize]) }
}

/// `1m 05s`.
pub fn human_duration(d: Duration) -> String {
    let s = d.as_secs();
    match s {
        0 if d.as_millis() < 1000 => format!("{} ms", d.as_millis()),
        0..60 => format!("{:.1} s", d.as_secs_f64()),
        60..3600 => format!("{}m {:02}s", s / 60, s % 60),
        _ => format!("{}h {:02}m", s / 3600, s % 3600 / 60),
    }
}

/// `23.5 M`.
pub fn human_count(n: usize) -> String {
    match n {
        0..1_000 => n.to_string(),
        1_000..1_000_000 => format!("{:.1} K", n as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} M", n as f64 / 1e6),
        _ => format!("{:.2} B", n as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_durations_and_counts_are_formatted_with_units() {
        assert_eq!(human_bytes(0), "0 B");
        assert_eq!(human_bytes(1536), "1.50 KiB");
        assert_eq!(human_bytes(3 << 30), "3.00 GiB");
        assert_eq!(human_duration(Duration::from_millis(65_000)), "1m 05s");
        assert_eq!(human_duration(Duration::from_millis(7_260_000)), "2h 01m");
        assert_eq!(human_count(23_500_000), "23.5 M");
    }
}
