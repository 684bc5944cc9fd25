//! Python's `'%d items' % count`: rewritten to the `format` filter before compiling, as the engine has no such
//! operator.
//!
//! Only a string literal can be on the left, which is how templates use it; `%` between other operands stays the
//! remainder.

/// `'…' % (a, b)` and `'…' % name.field` become `'…' | format(a, b)` and `'…' | format(name.field)`, inside of tags
/// only.
pub(super) fn rewrite(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{{").into_iter().chain(rest.find("{%")).min() {
        let end = if rest[open..].starts_with("{{") { "}}" } else { "%}" };
        out.push_str(&rest[..open + 2]);
        rest = &rest[open + 2..];
        while !rest.is_empty() && !rest.starts_with(end) {
            rest = step(rest, &mut out);
        }
    }
    out.push_str(rest);
    out
}

/// Copies one character, or a string literal with what it formats; returns what follows.
fn step<'a>(rest: &'a str, out: &mut String) -> &'a str {
    let first = rest.chars().next().expect("not empty");
    if first != '\'' && first != '"' {
        out.push(first);
        return &rest[first.len_utf8()..];
    }
    let literal = literal_len(rest, first);
    out.push_str(&rest[..literal]);
    let after = &rest[literal..];
    let Some(operand) = after.trim_start().strip_prefix('%').filter(|operand| !operand.starts_with('}')) else {
        return after;
    };
    let operand = operand.trim_start();
    let len = operand_len(operand);
    if len == 0 {
        return after;
    }
    let arguments = match operand[..len].strip_prefix('(').and_then(|inner| inner.strip_suffix(')')) {
        Some(inner) => inner.trim().trim_end_matches(','),
        None => &operand[..len],
    };
    out.push_str(" | format(");
    // An argument may be such an expression itself.
    let mut inner = arguments;
    while !inner.is_empty() {
        inner = step(inner, out);
    }
    out.push(')');
    &operand[len..]
}

/// Length of the string literal that `text` begins with, quotes included.
pub(super) fn literal_len(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Length of a parenthesis, a literal, or a name with its attributes, subscripts and calls; 0 for anything else.
fn operand_len(text: &str) -> usize {
    let mut at = 0;
    while let Some(c) = text[at..].chars().next() {
        match c {
            '(' | '[' => at += bracket_len(&text[at..]),
            '\'' | '"' if at == 0 => return literal_len(text, c),
            c if c.is_alphanumeric() || c == '_' || (c == '.' && at > 0) => at += c.len_utf8(),
            _ => break,
        }
    }
    at
}

/// Length of a bracket with its contents.
fn bracket_len(text: &str) -> usize {
    let (mut depth, mut at) = (0, 0);
    while let Some(c) = text[at..].chars().next() {
        match c {
            '\'' | '"' => {
                at += literal_len(&text[at..], c);
                continue;
            }
            '(' | '[' => depth += 1,
            ')' | ']' => depth -= 1,
            _ => {}
        }
        at += c.len_utf8();
        if depth == 0 {
            break;
        }
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_formatting_is_rewritten() {
        for (source, expected) in [
            ("{{ '%s-%d' % (a, b) }}", "{{ '%s-%d' | format(a, b) }}"),
            ("{{ \"%s\" % m.content[0] + 'x' }}", "{{ \"%s\" | format(m.content[0]) + 'x' }}"),
            ("{{ '%s' % ('%d' % n) }}", "{{ '%s' | format('%d' | format(n)) }}"),
            ("{{ '%s' % (a,) }}", "{{ '%s' | format(a) }}"),
            ("{{ 5 % 2 }} '%s' % (a)", "{{ 5 % 2 }} '%s' % (a)"),
            ("{% if x == 'a' %}'b'{% endif %}", "{% if x == 'a' %}'b'{% endif %}"),
            ("{% set a = 'it\\'s }}' %}", "{% set a = 'it\\'s }}' %}"),
            ("{{ 'open", "{{ 'open"),
            ("{{ '%s' % ", "{{ '%s' % "),
        ] {
            assert_eq!(rewrite(source), expected);
        }
    }
}
