//! What transformers defines for chat templates beyond Jinja, with the output of Python.
//!
//! Deliberately absent: Python's text for lists, objects and `None`. A template that prints one was not written for that
//! conversation, and the model would learn the text of a Python object.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Value};

use super::python_json::{Dumps, printed_number};

/// Two characters that Unicode reserves for the inside of programs; they enclose what a `generation` block prints.
pub(super) const GENERATION: [char; 2] = ['\u{fdd0}', '\u{fdd1}'];

const GENERATION_FILTER: &str = "phalanx_generation";

/// The date that templates print as today's: tokens that depend on the day of a run would differ between ranks and runs. It is
/// the date of Llama 3's template where it has no clock.
const TODAY: [(&str, &str); 12] = [
    ("%d", "26"),
    ("%m", "07"),
    ("%Y", "2024"),
    ("%y", "24"),
    ("%b", "Jul"),
    ("%B", "July"),
    ("%a", "Fri"),
    ("%A", "Friday"),
    ("%H", "00"),
    ("%I", "12"),
    ("%M", "00"),
    ("%S", "00"),
];

/// An environment with the delimiters, functions, filters and methods that transformers gives to chat templates.
pub(super) fn environment(source: &str) -> Environment<'static> {
    let mut environment = Environment::new();
    let mut syntax = environment.syntax().to_builder();
    syntax.trim_blocks(true).lstrip_blocks(true);
    environment.set_syntax(syntax.build().expect("the delimiters are the default ones"));
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.set_formatter(|out, _, value| out.write_str(&printed(value)?).map_err(Error::from));
    environment.add_filter("tojson", tojson);
    environment.add_filter(GENERATION_FILTER, |text: String| format!("{}{text}{}", GENERATION[0], GENERATION[1]));
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> { Err(refusal(message)) });
    // A template that can do without a clock has a date of its own.
    if !source.contains("strftime_now is defined") {
        environment.add_function("strftime_now", strftime_now);
    }
    environment
}

/// transformers marks assistant turns with its own blocks, which are not Jinja; a filter encloses their text here.
pub(super) fn with_generation_filter(source: &str) -> String {
    let mut plain = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let Some(close) = rest[open..].find("%}") else { break };
        let (before, block) = (&rest[..open], &rest[open..open + close + 2]);
        plain += before;
        plain += &match block.trim_matches(['{', '}', '%', '-', '+', ' ', '\n', '\t']) {
            "generation" => block.replace("generation", &format!("filter {GENERATION_FILTER}")),
            "endgeneration" => block.replace("endgeneration", "endfilter"),
            _ => block.to_owned(),
        };
        rest = &rest[open + close + 2..];
    }
    plain + rest
}

fn refusal(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn printed(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(String::new()),
        ValueKind::Bool => Ok(if value.is_true() { "True" } else { "False" }.to_owned()),
        ValueKind::None => Err(refusal("it prints an empty value (null); it expects a text there")),
        ValueKind::Seq | ValueKind::Iterable => Err(refusal("it prints a list; it expects a text there")),
        ValueKind::Map => Err(refusal("it prints an object; it expects a text there")),
        ValueKind::Number => Ok(printed_number(value)),
        ValueKind::Invalid => Err(refusal(value.to_string())),
        _ => Ok(value.to_string()),
    }
}

/// Python's `json.dumps(value, ensure_ascii=False)`, with the options that transformers offers.
fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    Dumps::of(&options)?.text(value).map(Value::from)
}

fn strftime_now(format: &str) -> Result<String, Error> {
    let text = TODAY.iter().fold(format.to_owned(), |text, (directive, value)| text.replace(directive, value));
    match text.find('%') {
        None => Ok(text),
        Some(_) => Err(refusal(format!("strftime_now with the format {format:?}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::value::Serde;
    use serde_json::json;

    fn rendered(source: &str) -> Result<String, String> {
        let mut environment = environment(source);
        environment.add_template("t", source).map_err(|error| error.to_string())?;
        let value = Value::from(Serde(json!({ "b": [1, 2.5, "<é>"], "a": {}, "none": null, "yes": true })));
        environment.get_template("t").unwrap().render(value).map_err(|error| error.to_string())
    }

    #[test]
    fn tojson_writes_what_python_writes() {
        let source = "{{ {'z': b, 'a': {'k': [], 'n': none}} | tojson }}";

        assert_eq!(rendered(source).unwrap(), r#"{"z": [1, 2.5, "<é>"], "a": {"k": [], "n": null}}"#);
        assert_eq!(
            rendered("{{ {'b': [1], 'a': {}} | tojson(indent=2) }}").unwrap(),
            "{\n  \"b\": [\n    1\n  ],\n  \"a\": {}\n}"
        );
        assert_eq!(rendered("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}").unwrap(), r#"{"a": 2, "b": 1}"#);
        assert_eq!(
            rendered("{{ b | tojson(separators=(',', ':'), ensure_ascii=true) }}").unwrap(),
            r#"[1,2.5,"<\u00e9>"]"#
        );
    }

    #[test]
    fn printing_what_is_no_text_is_refused_by_name() {
        assert_eq!(rendered("{{ yes }}{{ missing }}").unwrap(), "True");
        for (source, named) in [("{{ none }}", "null"), ("{{ b }}", "a list"), ("{{ a }}", "an object")] {
            let error = rendered(source).unwrap_err();

            assert!(error.contains(named), "{error}");
        }
    }

    #[test]
    fn clock_shows_a_fixed_date_unless_the_template_can_do_without() {
        assert_eq!(rendered("{{ strftime_now('%d %b %Y') }}").unwrap(), "26 Jul 2024");
        assert_eq!(rendered("{% if strftime_now is defined %}clock{% else %}own{% endif %}").unwrap(), "own");
        assert!(rendered("{{ strftime_now('%j') }}").is_err());
    }

    #[test]
    fn loops_can_be_left_as_in_jinja() {
        assert_eq!(
            rendered("{% for x in b %}{% if loop.last %}{% break %}{% endif %}{{ x }};{% endfor %}").unwrap(),
            "1;2.5;"
        );
    }
}
