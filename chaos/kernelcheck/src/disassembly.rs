//! Tensor instructions, in PTX and in machine code.

use crate::CheckError;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// Opcodes of the tensor cores: warps (`HMMA`, `IMMA`, `DMMA`), warp groups (`HGMMA`), and `tcgen05` (`UTCHMMA`, …).
const MACHINE_OPCODES: [&str; 8] = ["HMMA", "IMMA", "DMMA", "QMMA", "HGMMA", "IGMMA", "QGMMA", "UTC"];
const PTX_OPCODES: [&str; 3] = ["mma.sync", "wgmma.mma_async", "tcgen05.mma"];

/// Tensor instructions of each kernel of a PTX text.
pub(crate) fn tensor_instructions_of_ptx(ptx: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    let mut kernel = String::new();
    for line in ptx.lines() {
        if let Some((_, rest)) = line.split_once(".entry ") {
            kernel = rest.split('(').next().unwrap_or_default().trim().to_owned();
        }
        if PTX_OPCODES.iter().any(|opcode| line.contains(opcode)) {
            *counts.entry(kernel.clone()).or_default() += 1;
        }
    }
    counts
}

/// Tensor instructions of each kernel of a cubin.
pub(crate) fn tensor_instructions(nvdisasm: &Path, cubin: &[u8]) -> Result<BTreeMap<String, usize>, CheckError> {
    let fail = |reason: String| CheckError::Disassembly { program: nvdisasm.to_owned(), reason };
    // nvdisasm reads files only.
    let file = tempfile::NamedTempFile::new().map_err(|error| fail(error.to_string()))?;
    std::fs::write(file.path(), cubin).map_err(|error| fail(error.to_string()))?;
    let output = Command::new(nvdisasm).arg("-c").arg(file.path()).output();
    let output = output.map_err(|error| fail(error.to_string()))?;
    if !output.status.success() {
        return Err(fail(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    Ok(count(&String::from_utf8_lossy(&output.stdout)))
}

fn count(text: &str) -> BTreeMap<String, usize> {
    let mut counts = BTreeMap::new();
    let mut kernel = String::new();
    for line in text.lines() {
        if let Some(rest) = line.trim().strip_prefix(".text.")
            && let Some(name) = rest.strip_suffix(':')
        {
            kernel = name.to_owned();
        }
        let opcode = line.split_once("*/").map_or("", |(_, rest)| rest.trim_start());
        // A predicate stands before the opcode.
        let opcode = if opcode.starts_with('@') { opcode.split_once(' ').map_or("", |(_, rest)| rest) } else { opcode };
        if MACHINE_OPCODES.iter().any(|prefix| opcode.trim_start().starts_with(prefix)) {
            *counts.entry(kernel.clone()).or_default() += 1;
        }
    }
    counts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disassembly_counts_tensor_instructions_by_kernel() {
        let text = "\
.text.product_nt:
        /*2710*/                   HMMA.16816.F32.BF16 R16, R36.reuse, R44, R16 ;
        /*2720*/               @P0 HMMA.16816.F32.BF16 R28, R36.reuse, R46, R28 ;
        /*2730*/                   IADD3 R1, R1, R2, RZ ;
.text.adamw:
        /*0010*/                   FMUL R1, R1, R2 ;
.text.flash:
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], R24 ;
";

        let counts = count(text);

        assert_eq!(counts, BTreeMap::from([("product_nt".into(), 2), ("flash".into(), 1)]));
    }

    #[test]
    fn ptx_counts_tensor_instructions_by_kernel() {
        let ptx = ".visible .entry a(\n)\n{\n}\n.visible .entry b(\n)\n{\nmma.sync.aligned.m16n8k16 {};\n}\n";

        assert_eq!(tensor_instructions_of_ptx(ptx), BTreeMap::from([("b".into(), 1)]));
    }
}
