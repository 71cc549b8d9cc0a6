//! Templates give the texts that Jinja2 gives, and refuse what it refuses.

use super::*;

/// Made by `tests/reference/jinja.py` with Jinja2 3.1.6; `null` where it refuses.
const GOLDEN: &str = include_str!("golden.json");

#[test]
fn filters_tests_methods_and_operators_give_what_jinja2_gives() {
    let golden: Json = serde_json::from_str(GOLDEN).unwrap();
    let variables: Vec<(&str, &Json)> =
        golden["variables"].as_object().unwrap().iter().map(|(k, v)| (k.as_str(), v)).collect();
    let messages = golden["messages"].as_array().unwrap().iter().map(|message| message.as_object().unwrap());
    let messages: Vec<&Map<String, Json>> = messages.collect();

    let mut wrong = Vec::new();
    for case in golden["cases"].as_array().unwrap() {
        let source = case["template"].as_str().unwrap();
        let found = Template::parse(source).and_then(|template| template.render(&messages, &variables, Clock::Fixed));
        let text = found.as_ref().ok().map(|rendered| rendered.text.as_str());
        if text != case["text"].as_str() {
            wrong.push(format!("{source:?}: {found:?}, not {}", case["text"]));
        }
    }

    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

fn refusal(source: &str) -> String {
    Template::parse(source).and_then(|template| template.render(&[], &[], Clock::Fixed)).unwrap_err().to_string()
}

#[test]
fn template_without_end_is_refused_by_its_steps_bytes_or_depth() {
    let sources = [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% set x = i %}{% endfor %}{% endfor %}",
        "{% for i in range(100000) %}{{ 'a' * 1000000 }}{% endfor %}",
        "{% set n = namespace(s='aaaaaaaa') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s=[1]) %}{% for i in range(40) %}{% set n.s = n.s + n.s %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s=[1]) %}{% for i in range(40) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
        "{% set n = namespace(s=[1]) %}{% for i in range(40) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s | tojson }}",
        "{% set n = namespace(s='a') %}{% for i in range(40) %}{% set n.s = n.s | replace('a', 'aa') %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ '%1000000000s' % 'a' }}",
        "{{ 'a'.center(1000000000) }}",
        "{{ 'a' | indent(1000000000, true) }}",
        "{{ ['a'] * 1000000000 }}",
    ];

    for source in sources {
        let sentence = refusal(source);
        assert!(sentence.contains("more than") || sentence.contains("wider than"), "{source}: {sentence}");
    }
}

#[test]
fn deeply_nested_source_is_refused_without_exhausting_the_stack() {
    let sources = [
        "{{ ".to_owned() + &"(".repeat(5000) + "1" + &")".repeat(5000) + " }}",
        "{{ ".to_owned() + &"[".repeat(5000) + &"]".repeat(5000) + " }}",
        "{{ 1".to_owned() + &" + 1".repeat(5000) + " }}",
        "{{ ".to_owned() + &"not ".repeat(5000) + "1 }}",
        "{{ ".to_owned() + &"-".repeat(5000) + "1 }}",
        "{{ x".to_owned() + &".y".repeat(5000) + " }}",
        "{% if 1 %}".repeat(5000) + &"{% endif %}".repeat(5000),
    ];

    for source in sources {
        assert!(refusal(&source).contains("more than"), "{}", &source[..20]);
    }
}

#[test]
fn what_is_unknown_is_refused_by_its_name_and_line() {
    for (source, named) in [
        ("\n{{ 'a' | nope }}", "\"nope\" is not known to chat templates (template line 2)"),
        ("{{ 'a' is nope }}", "\"nope\""),
        ("{{ 'a'.nope() }}", "'nope'"),
        ("{{ nope() }}", "'nope' is undefined"),
        ("{{ [1] | random }}", "\"random\""),
        ("{% include 'x' %}", "\"include\""),
        ("{{ [1].append(2) }}", "append"),
    ] {
        let sentence = refusal(source);
        assert!(sentence.contains(named), "{sentence}");
    }
}

#[test]
fn clock_shows_a_fixed_date_unless_the_template_can_do_without() {
    let text = |source: &str, clock: Clock| Template::parse(source).unwrap().render(&[], &[], clock).unwrap().text;
    const EITHER: &str = "{% if strftime_now is defined %}clock{% else %}own{% endif %}";

    assert_eq!(text("{{ strftime_now('%d %b %Y') }}", Clock::Fixed), "26 Jul 2024");
    assert_eq!(text(EITHER, Clock::Fixed), "own");
    assert_eq!(text(EITHER, Clock::Local), "clock");
    assert!(refusal("{{ strftime_now('%Q') }}").contains("%Q"));
}

#[test]
fn list_of_content_parts_is_not_printed_as_a_text_of_python() {
    let parts = serde_json::json!([{ "type": "text", "text": "Hi" }]);

    let refused = Template::parse("{{ parts }}").unwrap().render(&[], &[("parts", &parts)], Clock::Fixed);

    assert!(refused.unwrap_err().to_string().contains("prints a list of texts"));
}
