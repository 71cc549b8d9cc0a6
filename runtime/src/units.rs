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

/// `12s`, `1m 05s`, `2h 01m`, `3d 04h`.
pub(crate) fn short_duration(d: Duration) -> String {
    let s = d.as_secs_f64().round() as u64;
    match s {
        0..60 => format!("{s}s"),
        60..3600 => format!("{}m {:02}s", s / 60, s % 60),
        3600..86_400 => format!("{}h {:02}m", s / 3600, s % 3600 / 60),
        _ => format!("{}d {:02}h", s / 86_400, s % 86_400 / 3600),
    }
}

/// `2026-11-27 07:01:23 UTC`, of milliseconds since 1970.
pub(crate) fn utc(unix_ms: u64) -> String {
    let (days, s) = (unix_ms / 86_400_000, unix_ms / 1000 % 86_400);
    // Source: Howard Hinnant, chrono-Compatible Low-Level Date Algorithms, `civil_from_days`: years begin in March.
    let days = days + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!("{year}-{month:02}-{day:02} {:02}:{:02}:{:02} UTC", s / 3600, s % 3600 / 60, s % 60)
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
        let times = [0, 951_827_696_000, 1_795_762_883_999].map(utc);
        assert_eq!(times, ["1970-01-01 00:00:00 UTC", "2000-02-29 12:34:56 UTC", "2026-11-27 07:01:23 UTC"]);
        let short = [12, 65, 7_260, 273_600].map(|s| short_duration(Duration::from_secs(s)));
        assert_eq!(short, ["12s", "1m 05s", "2h 01m", "3d 04h"]);
    }
}
