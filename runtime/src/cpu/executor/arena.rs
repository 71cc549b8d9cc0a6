//! The memory of a region: one anonymous mapping, zeroed by the kernel as it is first touched.

use memmap2::{MmapMut, MmapOptions};

/// Not enough memory for a region.
#[derive(Debug, thiserror::Error)]
#[error("cannot allocate {bytes} bytes for the program's buffers")]
pub struct AllocError {
    /// Size of the region.
    pub bytes: usize,
    /// The system's reason.
    #[source]
    pub source: std::io::Error,
}

/// Page-aligned memory of a fixed size.
#[derive(Debug)]
pub(super) struct Arena {
    map: Option<MmapMut>,
}

impl Arena {
    pub(super) fn new(bytes: usize) -> Result<Arena, AllocError> {
        if bytes == 0 {
            return Ok(Arena { map: None });
        }
        let map = MmapOptions::new().len(bytes).map_anon().map_err(|source| AllocError { bytes, source })?;
        // Huge pages save address translation in the products; a system without them is only slower.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Arena { map: Some(map) })
    }

    /// Address of the first byte; aligned to a page.
    pub(super) fn base(&self) -> *mut u8 {
        self.map.as_ref().map_or(std::ptr::NonNull::dangling().as_ptr(), |m| m.as_ptr().cast_mut())
    }

    pub(super) fn len(&self) -> usize {
        self.map.as_ref().map_or(0, |m| m.len())
    }
}
