#!/usr/bin/env python3
"""Writes what Jinja2 prints for the table of filters, tests, methods and operators below.

    python3 tests/reference/jinja.py > runtime/src/data/jinja/golden.json

The environment is that of transformers' chat templates. `runtime/src/data/jinja/golden_tests.rs` compares ours with the texts, without Python.
Needs transformers and Jinja2 3.1.
"""

import json

from transformers.utils.chat_template_utils import _compile_jinja_template

VARIABLES = {
    "s": "Hello, World", "padded": "  two words \n", "lines": "a\nb\r\nc\n", "unicode": "Größe ß Σίσυφος 世界 🌍", "empty": "",
    "n": 7, "negative": -7, "half": 2.5, "tiny": 1e-7, "huge": 1e16, "whole": 3.0, "yes": True, "no": False, "nothing": None,
    "list": [3, 1, 2], "words": ["b", "A", "c"], "nested": [[1, 2], [3]], "none_list": [],
    "d": {"b": 1, "a": [1, None, {"x": "é<\"'\n\t\u0001"}], "items": 5},
    "people": [{"name": "Bo", "age": 3, "tags": {"k": 1}}, {"name": "al", "age": 1}, {"name": "Cy", "age": 3, "tags": {"k": 2}}],
}

# Expressions; each is printed between bars.
EXPRESSIONS = r"""
s | upper ~ s | lower
s | capitalize
unicode | upper
unicode | lower
unicode | title
'a-b (c) [d' | title
unicode | capitalize
padded | trim
'xxaxx' | trim('x')
s | replace('o', '0')
s | replace('o', '0', 1)
s | replace('', '-')
s | length
list | count
list | first
list | last
none_list | first
list | sort
words | sort
words | sort(case_sensitive=true)
words | sort(reverse=true)
people | sort(attribute='age,name') | map(attribute='name') | list
people | sort(attribute='name') | map(attribute='name') | join(',')
d | dictsort
d | dictsort(reverse=true) | map('first') | list
{'x': 2, 'y': 1} | dictsort(by='value')
list | join
list | join('-')
people | join('-', attribute='name')
list | reverse | list
s | reverse
list | sum
people | sum(attribute='age')
list | sum(start=10)
list | min
list | max
words | min
words | max(case_sensitive=true)
people | max(attribute='age')
none_list | max
list | unique | list
[1, 1.0, true, 'a', 'A'] | unique | list
list | batch(2) | list
list | batch(2, 0) | list
list | slice(2) | list
list | slice(2, 'x') | list
list | map('string') | join('+')
people | map(attribute='tags.k') | list
people | map(attribute='tags.k', default=0) | list
people | map(attribute='missing', default='d') | list
words | map('upper') | list
list | map('abs') | sum
list | select('odd') | list
list | reject('odd') | list
list | select | list
list | select('>', 1) | list
people | selectattr('tags') | map(attribute='name') | list
people | rejectattr('tags') | map(attribute='name') | list
people | selectattr('age', 'equalto', 3) | map(attribute='name') | list
people | selectattr('age', 'in', [1, 2]) | list | length
people | selectattr('tags', 'defined') | list | length
people | groupby('age') | map('first') | list
people | groupby('age') | map('last') | map('length') | list
people | groupby('tags.k', default=0) | map('first') | list
missing | default('d')
empty | default('d')
empty | default('d', true)
nothing | d('d')
missing | length
missing | list
missing | join
missing | string
missing | upper
missing | items | list
d | items | list | length
d | list
s | list
s | string
n | string
nothing | string
list | string
d | string
yes | string
half | int
'42.9' | int
'0x1A' | int(base=16)
' 1_000 ' | int
'x' | int(5)
nothing | int
'3.5' | float
'x' | float
n | float
'1e3' | float
half | round
3.5 | round
-2.5 | round
2.675 | round(2)
1234.5 | round(-2)
1234 | round(-2)
n | round
2.1 | round(method='ceil')
2.19 | round(1, 'floor')
negative | abs
-2.5 | abs
'%s-%d' | format('a', 3)
'%(a)s' | format(a=1)
s | center(20) ~ '|'
lines | indent
lines | indent(2, true)
lines | indent('> ', blank=true)
'a\n\nb' | indent(2)
empty | indent(2, true)
s | truncate(9)
s | truncate(9, true)
s | truncate(9, false, '~', 0)
s | truncate
s | wordcount
'<b>a</b>  c &amp; d' | striptags
'<&">\'' | escape
'<&>' | e | string
'<' | safe
'<' | safe + '>'
'a/b c?é' | urlencode
{'a b': 1, 'c': '/'} | urlencode
1000 | filesizeformat
1 | filesizeformat
123456789 | filesizeformat
123456789 | filesizeformat(true)
people[0] | attr('name')
s | attr('upper') is defined
d | tojson
d | tojson(indent=2)
d | tojson(indent='\t')
d | tojson(ensure_ascii=true)
d | tojson(separators=(',', ':'))
d | tojson(indent=1, separators=('; ', '='))
d | tojson(sort_keys=true)
[] | tojson(indent=2)
{} | tojson(indent=2)
{1: 2, none: 3, true: 4} | tojson
unicode | tojson(ensure_ascii=true)
tiny | tojson
huge | tojson
(1, 2) | tojson
1e400 | tojson
'\u007f\u2028' | tojson
n is odd
n is even
n is divisibleby 7
n is divisibleby(2)
missing is defined
missing is undefined
nothing is none
nothing is not none
nothing is iterable
missing is iterable
s is iterable
s is sequence
n is sequence
list is sequence
d is sequence
d is mapping
d.items is defined
d['items']
d.items() | length
list is iterable
list is mapping
d.keys() is sequence
d.keys() is iterable
s is string
n is string
n is number
yes is number
yes is boolean
n is boolean
n is integer
yes is integer
half is float
n is float
yes is true
no is false
1 is true
s is lower
'abc' is lower
'ABC' is upper
'1' is upper
n is sameas 7
nothing is sameas none
n is eq 7
n is equalto(8)
n is ne 7
n is gt 6
n is ge 7
n is lt 7
n is le 7
n is greaterthan 6
n is lessthan 6
n is in [7]
'a' is in 'abc'
'upper' is filter
'nope' is filter
'odd' is test
'nope' is test
range is callable
n is callable
s is escaped
s.upper() is string
s.capitalize()
s.casefold()
'ß'.casefold()
s.center(16, '*')
s.count('o')
s.count('o', 5)
s.count('')
s.endswith('World')
s.endswith(('x', 'd'))
'a\tb'.expandtabs(4)
s.find('o')
s.find('o', 5)
s.find('z')
s.index('W')
s.rfind('o')
s.rindex('o')
'{} {}'.format(1, 'a')
'{0}{1}{0}'.format('a', 'b')
'{a[b]} {a}'.format(a={'b': 1})
'{:>5}|{:<5}|{:^5}|{:*^7}'.format('a', 'b', 'c', 'd')
'{:05d} {:+} {:,} {:.2f} {:e} {:g} {:%} {:x} {:#x} {:b}'.format(42, 3, 1234567, 3.14159, 12345.678, 0.0001, 0.25, 255, 255, 5)
'{!r} {!s}'.format('a', 'b')
'{{}}'.format()
'{x}'.format_map({'x': 1})
'a1'.isalnum()
'ab'.isalpha()
'é'.isascii()
'12'.isdecimal()
'1²'.isdigit()
'½'.isnumeric()
'a_1'.isidentifier()
'1a'.isidentifier()
'ab'.islower()
'AB'.isupper()
'Ab Cd'.istitle()
' \t'.isspace()
'a\n'.isprintable()
'-'.join(words)
''.join(['a', 'b'])
'a'.ljust(3) ~ '|'
'a'.rjust(3, '.')
padded.strip() ~ '|'
padded.lstrip() ~ '|'
padded.rstrip() ~ '|'
'xyaxy'.strip('yx')
'a=b=c'.partition('=')
'a=b=c'.rpartition('=')
'abc'.partition('=')
'abc'.rpartition('=')
'prefix-x'.removeprefix('prefix-')
'x-suffix'.removesuffix('-suffix')
s.replace('o', '0', 1)
padded.split()
'a,b,,c'.split(',')
'a,b,c'.split(',', 1)
'a,b,c'.rsplit(',', 1)
' a  b c '.split(none, 1)
' a  b c '.rsplit(none, 1)
'a</think>b'.split('</think>')[-1]
lines.splitlines()
lines.splitlines(true)
s.startswith('He')
s.startswith(('x', 'H'))
s.startswith('W', 7)
s.swapcase()
"they're bill's".title()
s.title()
s.upper()
s.lower()
'-7'.zfill(4)
'ab'.zfill(4)
list.index(1)
list.count(2)
list.copy()
(1, 2).count(1)
d.get('b')
d.get('z')
d.get('z', 'd')
d.keys() | list
d.values() | list | length
d.items() | list | first
people[0].items()
d.copy() == d
half.is_integer()
whole.is_integer()
n.bit_length()
n + 1
n - 10
n * 2
n / 2
n // 2
negative // 2
n % 4
negative % 4
n % -4
-7.5 // 2
-7.5 % 2
2 ** 10
2 ** -1
2 ** 0.5
-n
+n
-2 ** 2
1 + 2 * 3 - 4 / 2
7 // 2 * 2
n / 7
0.1 + 0.2
10 ** 20
tiny
huge
whole
123456789012345678
1e22
1.5e300
1_000
0x1F
0b11
0o17
3.14e-10
'a' + 'b'
'ab' * 3
list + [4]
(1,) + (2,)
[0] * 3
'%s' % 'a'
'%s %s' % ('a', 1)
'%d%%' % 5
'%05.1f|%-5d|%+d|%x|%X|%o|%e|%g|%r|%c' % (3.14159, 42, 3, 255, 255, 8, 12345.678, 0.00001, 'q', 'z')
'%5s|%-5s|%.2s' % ('a', 'b', 'cde')
'%(x)s' % {'x': 1}
'%s' % nothing
'a' ~ 1 ~ nothing ~ true ~ 2.0
1 ~ 2
n == 7.0
1 == true
'a' == 1
list == [3, 1, 2]
[1] == (1,)
{'a': 1, 'b': 2} == {'b': 2, 'a': 1}
missing == missing
nothing == missing
1 < 2 < 3
1 < 3 < 2
'a' < 'b'
[1, 2] < [1, 3]
n != 7
n >= 7 and n <= 7
'ell' in s
'z' not in s
3 in list
'b' in d
5 in missing
not n
not missing
n and s
0 or empty or 'x'
none or missing or 0
s if yes else n
s if no
'' if no else 'b' if no else 'c'
s[0]
s[-1]
s[99]
s[1:4]
s[:-2]
s[::-1]
s[::2]
s[-3:]
list[0]
list[-1]
list[1:]
list[::-1]
list[5]
list[:1] + list[1:]
(1, 2, 3)[1:]
messages[0].role
d.b
d['b']
d.a[2].x
d['a'][1]
d.missing
d['missing'] is defined
people.0.name
nothing.x is defined
'a' 'b'
'\x41\u00e9\n\t\\ \' \q \101'
[1, 'a', none, true, 1.5, [2], (3,), {'k': 'v'}]
(1,)
()
{}
{'a': none, 1: 'b'}
"it's"
["it's", 'say "x"', 'both \' "', 'é\n\u200b']
range(3)
range(3) | list
range(1, 10, 3) | list
range(5, 0, -2) | list
range(4)[1]
range(4)[1:]
range(0) | length
dict(a=1, b=2)
dict([('a', 1)], b=2)
namespace(a=1).a
namespace({'a': 2}).a
d.keys()
d.values() | first
list | length == 3
-1 | abs
n is defined and n > 3
list is not string and list is iterable
(list | length) > 2
loop is defined
true
True
none
None
false is false
[list, none_list] | map('length') | list
(s | lower).split(', ') | map('capitalize') | join(' & ')
people | map(attribute='name') | map('lower') | sort | join
people | selectattr('name', 'string') | rejectattr('age', 'lt', 2) | map(attribute='name') | list
caller is defined
'a' in ['a'] == true
x.y is defined if x is defined else 'no x'
""".strip().split("\n")

# Whole templates.
TEMPLATES = [
    "{% for x in list %}{{ loop.index }}/{{ loop.length }} {{ loop.index0 }} {{ loop.revindex }} {{ loop.revindex0 }} {{ loop.first }} {{ loop.last }} {{ x }};{% endfor %}",
    "{% for x in list %}{{ loop.previtem }}<{{ x }}<{{ loop.nextitem }};{% endfor %}",
    "{% for x in list %}{{ loop.cycle('a', 'b') }}{{ loop.changed(x > 1) }}{% endfor %}",
    "{% for x in list if x > 1 %}{{ loop.index }}{{ x }}{% else %}none{% endfor %}",
    "{% for x in [] %}a{% else %}none{% endfor %}",
    "{% for x in missing %}a{% else %}none{% endfor %}",
    "{{ '{:>5}|{:^9}|{}|{:d}'.format(yes, yes, yes, no) }}",
    "{% for x in list %}a{% break %}{% else %}left{% endfor %}",
    "{% for x in list %}{% if x == 1 %}a{% continue %}{% endif %}b{% break %}{% else %}left{% endfor %}",
    "{% for x in list %}{{ x }}{% if x > 1 %}{% break %}{% endif %}{% else %}left{% endfor %}",
    "{% for x in list %}{% continue %}{% else %}left{% endfor %}",
    "{% for x in list %}{{ x }}{% for y in [] %}{% else %}{% break %}{% endfor %}b{% endfor %}",
    "{% for k, v in d.items() %}{{ k }}={{ v }};{% endfor %}",
    "{% for k, v in d | dictsort %}{{ k }};{% endfor %}",
    "{% for c in 'äb' %}{{ c }}.{% endfor %}",
    "{% for x in d %}{{ x }},{% endfor %}",
    "{% for (a, b), c in [((1, 2), 3)] %}{{ a }}{{ b }}{{ c }}{% endfor %}",
    "{% for a in [1, [2, [3]]] recursive %}{% if a is iterable %}<{{ loop(a) }}{{ loop.depth }}>{% else %}{{ a }}{% endif %}{% endfor %}",
    "{% for x in list %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% if x == 2 %}{% break %}{% endif %}{% endfor %}",
    "{% set x = 1 %}{% for y in list %}{% set x = y %}{{ x }}{% endfor %}{{ x }}",
    "{% set ns = namespace(x=0) %}{% for y in list %}{% set ns.x = ns.x + y %}{% endfor %}{{ ns.x }}",
    "{% if yes %}{% set z = 5 %}{% endif %}{{ z }}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
    "{% set x %}a{{ n }}b{% endset %}{{ x }}|{{ x | length }}",
    "{% set x | upper %}abc{% endset %}{{ x }}",
    "{% with a = 1, b = n %}{{ a }}{{ b }}{% endwith %}{{ a }}",
    "{% filter upper %}abc{{ n }}{% endfilter %}",
    "{% macro m(a, b=2, c=b) %}{{ a }}-{{ b }}-{{ c }}{% endmacro %}{{ m(1) }} {{ m(1, c=3) }} {{ m(b=5, a=4) }} {{ m() }}",
    "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, x=2) }}",
    "{% macro m(a) %}[{{ caller(a) }}]{% endmacro %}{% call(x) m(7) %}<{{ x }}>{% endcall %}",
    "{% macro r(x) %}{{ x }}{% if x > 0 %}{{ r(x - 1) }}{% endif %}{% endmacro %}{{ r(3) }}",
    "{% macro outer() %}{{ later }}{% endmacro %}{% set later = 'set' %}{{ outer() }}",
    "{% set j = joiner(', ') %}{% for x in list %}{{ j() }}{{ x }}{% endfor %}",
    "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}",
    "{% generation %}x{{ n }}{% endgeneration %}",
    "{% raw %}{{ x }}{% y %}{% endraw %}",
    "a {# comment #} b{#- c -#} d",
    "  {% if yes %}\n  a\n  {% endif %}\n  b",
    "  {%- if yes %}\n  a\n  {%- endif %}\n  b",
    "  {%+ if yes %}\n  a\n  {%+ endif +%}\n  b",
    "x  {{- n -}}  y",
    "x\n\n{%- if yes -%}\n\n y {% endif -%} \n z",
    "{% if yes %}a{% endif %}\n\nb\n",
    "a\r\n{% if yes %}\r\nb\r\n{% endif %}\r\nc\rd",
    "{{ 'a\\nb' }}{{ '}}' }}{{ {'a': {'b': 1}}['a']['b'] }}",
    "{% if no %}a{% elif n == 7 %}b{% else %}c{% endif %}",
    "{% print n, 's' %}",
    "{{ n, s }}",
    "{% for m in messages[1:] %}{{ m.role }}:{{ m['content'] }};{% endfor %}",
    "{% for i in range(messages | length) %}{{ messages[i]['role'] }}{% endfor %}",
    "{{ messages | tojson }}",
    "{% set messages = messages[1:] %}{{ messages | length }}",
    "{% for x in list %}{% for y in list %}{{ loop.index }}{% endfor %}{{ loop.index }}{% endfor %}",
    "{% set s = 'a' %}{% macro m() %}{{ s }}{% endmacro %}{% for s in ['b'] %}{{ m() }}{{ s }}{% endfor %}",
    "{{ raise_exception('no') }}",
    "{{ nothing + 'a' }}",
    "{{ missing.x }}",
    "{{ missing + 1 }}",
    "{{ 'a' + 1 }}",
    "{{ 1 < 'a' }}",
    "{{ n.x.y }}",
    "{{ missing() }}",
    "{{ s() }}",
    "{{ s.nope() }}",
    "{{ list.append(4) }}",
    "{{ d.pop('b') }}",
    "{{ d.update({}) }}",
    "{{ n | length }}",
    "{{ n | nope }}",
    "{{ n is nope }}",
    "{{ missing | tojson }}",
    "{{ range(1000000) }}",
    "{{ s.index('zz') }}",
    "{{ 1 / 0 }}",
    "{{ n | join }}",
    "{% for x in n %}{% endfor %}",
    "{{ 'x' in n }}",
    "{{ [1, 'a'] | sort }}",
    "{{ '%d' % 'a' }}",
    "{{ '%s %s' % 'a' }}",
    "{% set q.x = 1 %}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(1, 2) }}",
    "{% macro m(a) %}{{ a }}{% endmacro %}{{ m(b=2) }}",
    "{% set a, b = 1, 2, 3 %}",
    "{{ {[1]: 2} }}",
]

MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]


def main():
    cases = []
    for source in ["|{{ " + expression + " }}|" for expression in EXPRESSIONS] + TEMPLATES:
        try:
            text = _compile_jinja_template(source).render(messages=MESSAGES, **VARIABLES)
        except Exception:  # Whatever a template or Jinja raises is a refusal.
            text = None
        cases.append({"template": source, "text": text})
    print(json.dumps({"variables": VARIABLES, "messages": MESSAGES, "cases": cases}, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
