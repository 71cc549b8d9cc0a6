//! Options of the compiler: those that change results are kept, those that cannot are accepted, others are errors.

use super::ARCHITECTURES;

/// What the options ask.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Options {
    /// `90`, `90a`.
    pub arch: String,
    /// `compute_90`: for no device in particular.
    pub is_virtual: bool,
    /// Whether products and sums may be contracted.
    pub fmad: bool,
    pub standard: String,
    /// `-D`, `-U` and `-I`, as the host compiler takes them.
    pub preprocessor: Vec<String>,
}

const WITHOUT_EFFECT: [&str; 16] = [
    "--generate-line-info",
    "-lineinfo",
    "--device-debug",
    "-G",
    "--restrict",
    "-restrict",
    "--disable-warnings",
    "-w",
    "--extra-device-vectorization",
    "-extra-device-vectorization",
    "--device-as-default-execution-space",
    "-default-device",
    "--minimal",
    "-minimal",
    "--no-source-include",
    "-no-source-include",
];
const WITHOUT_EFFECT_WITH_VALUE: [&str; 8] = [
    "--maxrregcount",
    "-maxrregcount",
    "--ptxas-options",
    "-Xptxas",
    "--split-compile",
    "-split-compile",
    "--diag-suppress",
    "-diag-suppress",
];

impl Options {
    /// # Errors
    /// A message about the first option that is not known.
    pub fn parse(options: &[String]) -> Result<Options, String> {
        let standard = "c++17".into();
        let mut parsed =
            Options { arch: "75".into(), is_virtual: true, fmad: true, standard, preprocessor: Vec::new() };
        let mut rest = options.iter();
        while let Some(option) = rest.next() {
            parsed.take(option, &mut rest)?;
        }
        Ok(parsed)
    }

    fn take<'a>(&mut self, option: &str, rest: &mut impl Iterator<Item = &'a String>) -> Result<(), String> {
        if WITHOUT_EFFECT.contains(&option) {
            return Ok(());
        }
        let refused = || format!("unrecognized option {option} found");
        for (short, long) in [("-D", "--define-macro"), ("-U", "--undefine-macro"), ("-I", "--include-path")] {
            let Some(value) = option.strip_prefix(short).or_else(|| option.strip_prefix(long)) else { continue };
            let value = match value.strip_prefix('=').unwrap_or(value).trim() {
                "" => rest.next().ok_or_else(refused)?,
                value => value,
            };
            self.preprocessor.push(format!("{short}{value}"));
            return Ok(());
        }
        let (name, value) = match option.split_once('=') {
            Some((name, value)) => (name, value),
            None => (option, rest.next().ok_or_else(refused)?.as_str()),
        };
        match name {
            "--gpu-architecture" | "-arch" => self.set_arch(value)?,
            "--fmad" | "-fmad" => self.fmad = value == "true",
            "--std" | "-std" if ["c++17", "c++20"].contains(&value) => self.standard = value.into(),
            _ if WITHOUT_EFFECT_WITH_VALUE.contains(&name) => {}
            _ => return Err(refused()),
        }
        Ok(())
    }

    fn set_arch(&mut self, value: &str) -> Result<(), String> {
        let refused = || format!("invalid value for --gpu-architecture (-arch): {value}");
        let (kind, arch) = value.split_once('_').ok_or_else(refused)?;
        let number = arch.trim_end_matches(['a', 'f']).parse().map_err(|_| refused())?;
        if !["sm", "compute"].contains(&kind) || !ARCHITECTURES.contains(&number) {
            return Err(refused());
        }
        (self.arch, self.is_virtual) = (arch.into(), kind == "compute");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(options: &[&str]) -> Result<Options, String> {
        Options::parse(&options.iter().map(|o| (*o).to_string()).collect::<Vec<_>>())
    }

    #[test]
    fn options_are_understood_in_all_their_spellings() {
        let parsed =
            parse(&["-DA=1", "-D", "B", "--define-macro=C=2", "-arch", "sm_90a", "--fmad=false", "-w"]).unwrap();

        assert_eq!(parsed.preprocessor, ["-DA=1", "-DB", "-DC=2"]);
        assert_eq!((parsed.arch.as_str(), parsed.is_virtual, parsed.fmad), ("90a", false, false));
    }

    #[test]
    fn unknown_options_and_architectures_are_errors() {
        for wrong in [&["--use_fast_math"][..], &["-arch=sm_12"], &["--std=c++98"], &["-D"], &["--foo=1"], &["-arch"]] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
    }
}
