//! How long a certificate is valid.

use std::time::{Duration, SystemTime};

/// Validity period of a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    /// When it becomes valid.
    pub not_before: SystemTime,
    /// When it expires.
    pub not_after: SystemTime,
}

impl Validity {
    /// Default lifetime of node certificates.
    pub const LIFETIME: Duration = Duration::from_secs(24 * 60 * 60);
    /// Largest allowed difference between the clocks of two machines, or between two readings of one clock that is set back: an
    /// hour, as by a wrong time zone, and a reserve.
    pub const CLOCK_SKEW_MAX: Duration = Duration::from_secs(2 * 60 * 60);

    /// A period that starts [`Self::CLOCK_SKEW_MAX`] before `now`, since another machine's clock may be behind.
    pub fn starting(now: SystemTime, lifetime: Duration) -> Validity {
        Validity { not_before: now - Validity::CLOCK_SKEW_MAX, not_after: now + lifetime }
    }

    /// When to renew the certificate: after two thirds of its lifetime.
    pub fn renewal_due(&self) -> SystemTime {
        let validity = self.not_after.duration_since(self.not_before).unwrap_or_default();
        self.not_after - validity.saturating_sub(Validity::CLOCK_SKEW_MAX) / 3
    }

    /// Whether to renew the certificate at this time: it is due, or the clock has been set back to before its issue.
    pub fn is_due(&self, now: SystemTime) -> bool {
        now >= self.renewal_due() || now < self.not_before + Validity::CLOCK_SKEW_MAX
    }
}
