//! Python's side of Jinja templates: what Hugging Face's set-up does and minijinja does not.
//!
//! `tojson` as `json.dumps` writes it, more methods of strings and lists, `True`, `False` and `None` in output, and the
//! `{% generation %}` tags of training.

use std::fmt::Write;

use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{AutoEscape, Error, ErrorKind, Output, State};

use super::guard::{ESCAPE, MARK};
use super::origin::ORIGIN;

/// How `json.dumps` is asked to write.
struct JsonStyle {
    ensure_ascii: bool,
    indent: Option<usize>,
    between_items: String,
    after_key: String,
    sort_keys: bool,
}

/// The `tojson` filter: `json.dumps(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn tojson(
    value: &Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    separators: Option<Value>,
    kwargs: Kwargs,
) -> Result<String, Error> {
    let option = |positional: Option<Value>, name| -> Result<Option<Value>, Error> {
        let value = match positional {
            Some(value) => Some(value),
            None => kwargs.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|value| !value.is_none()))
    };
    let flag = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let ensure_ascii = flag(option(ensure_ascii, "ensure_ascii")?);
    let width = |value: Value| value.as_i64().unwrap_or(i64::from(value.is_true())).clamp(0, 64) as usize;
    let indent = option(indent, "indent")?.map(width);
    let separators = option(separators, "separators")?;
    let sort_keys = flag(option(None, "sort_keys")?);
    kwargs.assert_all_used()?;
    let (between_items, after_key) = match separators {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some(pair) => (pair.get_item_by_index(0)?.to_string(), pair.get_item_by_index(1)?.to_string()),
    };
    let style = JsonStyle { ensure_ascii, indent, between_items, after_key, sort_keys };
    let mut out = String::new();
    write_json(&mut out, value, &style, 0)?;
    Ok(out)
}

fn write_json(out: &mut String, value: &Value, style: &JsonStyle, depth: usize) -> Result<(), Error> {
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => write_json_string(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            write_items(out, ('[', ']'), items.len(), style, depth, |out, at| {
                write_json(out, &items[at], style, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort_keys {
                keys.sort();
            }
            write_items(out, ('{', '}'), keys.len(), style, depth, |out, at| {
                write_json_string(out, &json_key(&keys[at]), style.ensure_ascii);
                out.push_str(&style.after_key);
                write_json(out, &value.get_item(&keys[at])?, style, depth + 1)
            })?;
        }
        kind => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("Object of type {kind} is not JSON serializable"),
            ));
        }
    }
    Ok(())
}

fn write_items(
    out: &mut String,
    (open, close): (char, char),
    len: usize,
    style: &JsonStyle,
    depth: usize,
    mut write: impl FnMut(&mut String, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    let line = |out: &mut String, depth: usize| {
        if let Some(indent) = style.indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', indent * depth));
        }
    };
    out.push(open);
    for at in 0..len {
        if at > 0 {
            out.push_str(&style.between_items);
        }
        line(out, depth + 1);
        write(out, at)?;
    }
    if len > 0 {
        line(out, depth);
    }
    out.push(close);
    Ok(())
}

fn json_key(key: &Value) -> String {
    match key.kind() {
        ValueKind::None => "null".into(),
        ValueKind::Bool => key.is_true().to_string(),
        ValueKind::Number => number(key),
        _ => key.to_string(),
    }
}

/// The marks of `guard` and `origin` stay as they are, to be taken out later.
fn write_json_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if c < ' ' => push_escaped(out, c as u16),
            MARK | ESCAPE | ORIGIN => out.push(c),
            c if ensure_ascii && !c.is_ascii() => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    push_escaped(out, *unit);
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

fn push_escaped(out: &mut String, unit: u16) {
    write!(out, "\\u{unit:04x}").expect("a String takes everything");
}

/// A number as Python's `repr` shows it.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    f64::try_from(value.clone()).map_or_else(|_| value.to_string(), float)
}

/// Python's shortest form: exponent below 1e-4 and from 1e16 on, always a point or an exponent.
fn float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    let scientific = format!("{number:e}");
    let (mantissa, exponent) = scientific.split_once('e').expect("the format has an exponent");
    let exponent: i32 = exponent.parse().expect("the exponent is a number");
    if number != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{mantissa}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{number}");
    if plain.contains('.') { plain } else { plain + ".0" }
}

/// What `{{ … }}` prints.
pub(super) fn format_output(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    // Nearly all that is printed is text, and this is faster than the engine's own way through its formatting.
    if let (Some(text), AutoEscape::None) = (value.as_str(), state.auto_escape()) {
        return out.write_str(text).map_err(Error::from);
    }
    match python_word(value) {
        Some(word) => out.write_str(&word).map_err(Error::from),
        None => minijinja::escape_formatter(out, state, value),
    }
}

/// The `string` filter.
pub(super) fn string(value: &Value) -> Value {
    match python_word(value) {
        Some(word) => word.into(),
        None if value.kind() == ValueKind::String => value.clone(),
        None => value.to_string().into(),
    }
}

fn python_word(value: &Value) -> Option<String> {
    match value.kind() {
        ValueKind::Bool => Some(if value.is_true() { "True" } else { "False" }.into()),
        ValueKind::None => Some("None".into()),
        ValueKind::Number if !value.is_integer() => Some(number(value)),
        _ => None,
    }
}

/// Methods that neither minijinja nor its Python module has; the rest goes on to that module.
pub(super) fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        match name {
            "rsplit" => return rsplit(text, args),
            "index" | "rindex" => {
                let (needle,): (&str,) = from_args(args)?;
                let found = if name == "index" { text.find(needle) } else { text.rfind(needle) };
                let at = found.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "substring not found"))?;
                return Ok(text[..at].chars().count().into());
            }
            "removeprefix" => {
                let (prefix,): (&str,) = from_args(args)?;
                return Ok(text.strip_prefix(prefix).unwrap_or(text).into());
            }
            "removesuffix" => {
                let (suffix,): (&str,) = from_args(args)?;
                return Ok(text.strip_suffix(suffix).unwrap_or(text).into());
            }
            "partition" | "rpartition" => return partition(text, name == "partition", args),
            _ => {}
        }
    }
    if value.kind() == ValueKind::Seq && name == "index" {
        let (wanted,): (&Value,) = from_args(args)?;
        let at = value.try_iter()?.position(|item| item == *wanted);
        return at
            .map(Value::from)
            .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, format!("{wanted} is not in list")));
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, limit): (Option<&str>, Option<i64>) = from_args(args)?;
    let limit = limit.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = Vec::new();
    let mut rest = match separator {
        Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
        Some(_) => text,
        None => text.trim_end(),
    };
    while parts.len() < limit {
        let split = match separator {
            Some(separator) => rest.rsplit_once(separator),
            None => rest.rsplit_once(char::is_whitespace).map(|(before, word)| (before.trim_end(), word)),
        };
        let Some((before, part)) = split else { break };
        parts.push(part);
        rest = before;
        if separator.is_none() && rest.is_empty() {
            break;
        }
    }
    if separator.is_some() || !rest.is_empty() {
        parts.push(rest);
    }
    Ok(parts.into_iter().rev().map(Value::from).collect())
}

fn partition(text: &str, first: bool, args: &[Value]) -> Result<Value, Error> {
    let (separator,): (&str,) = from_args(args)?;
    let found = if first { text.split_once(separator) } else { text.rsplit_once(separator) };
    let parts = match found {
        Some((before, after)) => [before, separator, after],
        None if first => [text, "", ""],
        None => ["", "", text],
    };
    Ok(parts.into_iter().map(Value::from).collect())
}

/// `{% generation %}` … `{% endgeneration %}` mark what is trained on and print nothing: they become an `if true`,
/// which keeps every form of white-space control as it was.
pub(super) fn rewrite_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(open) = rest.find("{%") {
        let (before, tag) = rest.split_at(open + 2);
        out.push_str(before);
        rest = tag;
        let Some(close) = tag.find("%}") else { break };
        let inner = tag[..close].trim_start_matches(['-', '+']).trim_end_matches(['-', '+']);
        let replacement = match inner.trim() {
            "generation" => "if true",
            "endgeneration" => "endif",
            _ => continue,
        };
        out.push_str(&tag[..close].replacen(inner.trim(), replacement, 1));
        rest = &tag[close..];
    }
    out.push_str(rest);
    out
}
