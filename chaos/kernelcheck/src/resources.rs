//! The report of `--ptxas-options=-v`.

/// What the assembler says about a function.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Resources {
    pub(crate) name: String,
    /// Known of kernels only.
    pub(crate) registers: Option<u32>,
    pub(crate) spill_store_bytes: u64,
    pub(crate) spill_load_bytes: u64,
    pub(crate) stack_bytes: u64,
    pub(crate) shared_bytes: u64,
}

/// The functions of a log, by name.
pub(crate) fn parse(log: &str) -> Vec<Resources> {
    let mut functions: Vec<Resources> = Vec::new();
    let mut kernel = String::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next().unwrap_or_default().to_owned();
        } else if let Some((_, name)) = line.split_once("Function properties for ") {
            functions.push(Resources { name: name.trim().to_owned(), ..Resources::default() });
        } else if line.contains("bytes stack frame") {
            if let Some(function) = functions.last_mut() {
                function.stack_bytes = number_before(line, " bytes stack frame");
                function.spill_store_bytes = number_before(line, " bytes spill stores");
                function.spill_load_bytes = number_before(line, " bytes spill loads");
            }
        } else if line.contains(": Used ")
            && let Some(function) = functions.iter_mut().find(|f| f.name == kernel)
        {
            function.registers = Some(number_before(line, " registers") as u32);
            function.shared_bytes = number_before(line, " bytes smem");
        }
    }
    functions.sort_by(|a, b| a.name.cmp(&b.name));
    functions
}

/// The number that stands before some words; 0 if the line does not have them.
fn number_before(line: &str, words: &str) -> u64 {
    let before = line.split_once(words).map_or("", |(before, _)| before);
    before.rsplit(|c: char| !c.is_ascii_digit()).next().and_then(|n| n.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 326 bytes gmem
ptxas info    : Compiling entry function 'spiller' for 'sm_90a'
ptxas info    : Function properties for spiller
ptxas         .     544 bytes stack frame, 820 bytes spill stores, 876 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 544 bytes cumulative stack size
ptxas info    : Compile time = 65.932 ms
ptxas info    : Function properties for helper
ptxas         .     8 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function 'norm' for 'sm_90a'
ptxas info    : Function properties for norm
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 19 registers, used 1 barriers, 1024 bytes smem
";

    #[test]
    fn log_gives_registers_spills_stack_and_shared_memory_by_function() {
        let [helper, norm, spiller] = parse(LOG).try_into().unwrap();

        assert_eq!(helper, Resources { name: "helper".into(), stack_bytes: 8, ..Resources::default() });
        let expected =
            Resources { name: "norm".into(), registers: Some(19), shared_bytes: 1024, ..Resources::default() };
        assert_eq!(norm, expected);
        assert_eq!((spiller.registers, spiller.stack_bytes), (Some(32), 544));
        assert_eq!((spiller.spill_store_bytes, spiller.spill_load_bytes), (820, 876));
    }
}
