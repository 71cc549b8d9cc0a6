//! The date that templates print as today's, by `strftime_now` of transformers.
#![allow(unsafe_code)] // Calls of the C library, which Python's function calls too.

use std::ffi::CString;
use std::time::{SystemTime, UNIX_EPOCH};

use super::error::Error;

/// Most bytes of a printed date.
const DATE_BYTES_MAX: usize = 1024;

/// What may stand behind `%`.
const DIRECTIVES: &str = "aAbBcCdDeFgGhHIjklmMnpPrRsStTuUVwWxXyYzZ%";

/// Friday, 26 July 2024: the date of Llama 3's template where it has no clock.
const FIXED: libc::tm = libc::tm {
    tm_sec: 0,
    tm_min: 0,
    tm_hour: 0,
    tm_mday: 26,
    tm_mon: 6,
    tm_year: 124,
    tm_wday: 5,
    tm_yday: 207,
    tm_isdst: 0,
    tm_gmtoff: 0,
    tm_zone: std::ptr::null(),
};

/// Where a template's date comes from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::data) enum Clock {
    /// The same date every day, for training: tokens that depend on the day of a run would differ between ranks and runs. A template
    /// that can do without a clock has none, and prints a date of its own.
    #[default]
    Fixed,
    /// The local time, where a model is asked.
    Local,
}

impl Clock {
    /// The date in this format.
    ///
    /// # Errors
    /// When the format is no format, or the text is too long.
    pub(super) fn text(self, format: &str) -> Result<String, Error> {
        let date = match self {
            Self::Fixed => FIXED,
            Self::Local => local(SystemTime::now()),
        };
        printed(format, &date).ok_or_else(|| Error::new(format!("strftime_now with the format {format:?}")))
    }
}

fn local(now: SystemTime) -> libc::tm {
    let seconds = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    let seconds = libc::time_t::try_from(seconds).unwrap_or(libc::time_t::MAX);
    let mut date = FIXED;
    // SAFETY: both are local variables; a failure leaves the date as it is.
    unsafe { libc::localtime_r(&raw const seconds, &raw mut date) };
    date
}

fn printed(format: &str, date: &libc::tm) -> Option<String> {
    // The letter in front tells an empty text from a failure.
    let format = CString::new(format!("x{format}")).ok().filter(|_| is_format(format))?;
    let mut text = [0_u8; DATE_BYTES_MAX];
    // SAFETY: the buffer has as many bytes as the call is told, and the format ends with a zero.
    let len = unsafe { libc::strftime(text.as_mut_ptr().cast(), text.len(), format.as_ptr(), date) };
    std::str::from_utf8(&text[..len]).ok()?.strip_prefix('x').map(str::to_owned)
}

/// Whether every directive is known, also with `-` for numbers without zeros in front. The C library prints others as they are.
fn is_format(format: &str) -> bool {
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        let directive = (c == '%').then(|| match chars.next() {
            Some('-') => chars.next(),
            directive => directive,
        });
        if directive.is_some_and(|directive| !directive.is_some_and(|letter| DIRECTIVES.contains(letter))) {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_clock_prints_one_day() {
        assert_eq!(
            Clock::Fixed.text("%A, %-d %b %Y %j %H:%M %F%%").unwrap(),
            "Friday, 26 Jul 2024 208 00:00 2024-07-26%"
        );
        assert_eq!(Clock::Fixed.text("").unwrap(), "");
        for format in ["%Q", "%", "%-", "%é", &"%Y".repeat(DATE_BYTES_MAX)] {
            assert!(Clock::Fixed.text(format).is_err(), "{format}");
        }
    }

    #[test]
    fn local_clock_prints_this_second() {
        let before = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();

        let printed: u64 = Clock::Local.text("%s").unwrap().parse().unwrap();

        assert!((before..before + 60).contains(&printed), "{printed}");
    }
}
