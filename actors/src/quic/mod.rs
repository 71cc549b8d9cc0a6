//! Quic.
