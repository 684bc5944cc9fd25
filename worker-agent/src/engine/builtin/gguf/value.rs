//! Metadata values: scalars by value, strings and arrays as ranges of the map.

use std::ops::Range;

use super::cursor::Cursor;
use super::error::Problem;

/// A metadata value. Strings are bytes here because the format does not promise UTF-8.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// An unsigned integer of 8 to 64 bits.
    Unsigned(u64),
    /// A signed integer of 8 to 64 bits.
    Signed(i64),
    /// A float of 32 or 64 bits.
    Float(f64),
    /// A boolean.
    Bool(bool),
    /// A string.
    Str(&'a [u8]),
    /// An array.
    Array(Array<'a>),
}

impl Value<'_> {
    /// What it is, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Value::Unsigned(_) => "an unsigned integer",
            Value::Signed(_) => "a signed integer",
            Value::Float(_) => "a float",
            Value::Bool(_) => "a boolean",
            Value::Str(_) => "a string",
            Value::Array(_) => "an array",
        }
    }
}

/// An array of scalars or strings, still encoded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Array<'a> {
    element: Element,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements, decoded one by one.
    pub fn iter(&self) -> impl Iterator<Item = Value<'a>> + use<'a> {
        let (element, mut cursor) = (self.element, Cursor::new(self.bytes));
        // `Raw::read` has walked over these bytes already, so no element is missing.
        (0..self.len).map_while(move |_| element.read(&mut cursor, "an array").ok())
    }
}

/// A type that metadata can be read as.
pub trait FromValue<'a>: Sized {
    /// The type's name in messages, with its article.
    const EXPECTED: &'static str;

    /// The value as this type; `None` if it is something else or does not fit.
    fn from_value(value: Value<'a>) -> Option<Self>;
}

macro_rules! integers {
    ($($t:ty: $name:literal),*) => {$(
        impl FromValue<'_> for $t {
            const EXPECTED: &'static str = $name;
            fn from_value(value: Value<'_>) -> Option<Self> {
                match value {
                    Value::Unsigned(v) => v.try_into().ok(),
                    Value::Signed(v) => v.try_into().ok(),
                    _ => None,
                }
            }
        }
    )*};
}
integers!(u32: "an unsigned 32-bit integer", i32: "a 32-bit integer", u64: "an unsigned integer", usize: "an unsigned integer");

impl FromValue<'_> for f32 {
    const EXPECTED: &'static str = "a float";
    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::Float(v) => Some(v as f32),
            _ => None,
        }
    }
}

impl FromValue<'_> for bool {
    const EXPECTED: &'static str = "a boolean";
    fn from_value(value: Value<'_>) -> Option<Self> {
        match value {
            Value::Bool(v) => Some(v),
            _ => None,
        }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const EXPECTED: &'static str = "a UTF-8 string";
    fn from_value(value: Value<'a>) -> Option<Self> {
        match value {
            Value::Str(bytes) => std::str::from_utf8(bytes).ok(),
            _ => None,
        }
    }
}

impl<'a, T: FromValue<'a>> FromValue<'a> for Vec<T> {
    const EXPECTED: &'static str = "an array of the right type";
    fn from_value(value: Value<'a>) -> Option<Self> {
        match value {
            Value::Array(array) => array.iter().map(T::from_value).collect(),
            _ => None,
        }
    }
}

/// Types of scalars and strings, by the format's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    Str,
    U64,
    I64,
    F64,
}

/// The format's number for arrays, which is not an [`Element`]: arrays do not nest.
const ARRAY: u32 = 9;

impl Element {
    fn from_number(number: u32, key: &str) -> Result<Element, Problem> {
        Ok(match number {
            0 => Element::U8,
            1 => Element::I8,
            2 => Element::U16,
            3 => Element::I16,
            4 => Element::U32,
            5 => Element::I32,
            6 => Element::F32,
            7 => Element::Bool,
            8 => Element::Str,
            10 => Element::U64,
            11 => Element::I64,
            12 => Element::F64,
            n => return Err(Problem::Malformed(format!("metadata key {key:?} has the unknown type {n}"))),
        })
    }

    /// Bytes of one element; `None` for strings.
    fn size(self) -> Option<usize> {
        match self {
            Element::U8 | Element::I8 | Element::Bool => Some(1),
            Element::U16 | Element::I16 => Some(2),
            Element::U32 | Element::I32 | Element::F32 => Some(4),
            Element::U64 | Element::I64 | Element::F64 => Some(8),
            Element::Str => None,
        }
    }

    fn read<'a>(self, cursor: &mut Cursor<'a>, what: &str) -> Result<Value<'a>, Problem> {
        let Some(size) = self.size() else { return Ok(Value::Str(cursor.string(what)?)) };
        let mut wide = [0; 8];
        wide[..size].copy_from_slice(cursor.take(size, what)?);
        let bits = u64::from_le_bytes(wide);
        Ok(match self {
            Element::U8 | Element::U16 | Element::U32 | Element::U64 => Value::Unsigned(bits),
            Element::I8 => Value::Signed(bits as i8 as i64),
            Element::I16 => Value::Signed(bits as i16 as i64),
            Element::I32 => Value::Signed(bits as i32 as i64),
            Element::I64 => Value::Signed(bits as i64),
            Element::F32 => Value::Float(f32::from_bits(bits as u32) as f64),
            Element::F64 => Value::Float(f64::from_bits(bits)),
            Element::Bool => Value::Bool(bits != 0),
            Element::Str => Value::Str(&[]),
        })
    }
}

/// Where a value is in the file.
#[derive(Clone, Debug)]
pub(super) struct Raw {
    element: Element,
    /// Number of elements if it is an array.
    array: Option<usize>,
    range: Range<usize>,
}

impl Raw {
    /// Walks over a value, so that it can be decoded later without errors.
    pub(super) fn read(cursor: &mut Cursor<'_>, key: &str) -> Result<Raw, Problem> {
        let what = format!("metadata key {key:?}");
        let number = cursor.u32(&what)?;
        if number != ARRAY {
            let element = Element::from_number(number, key)?;
            let start = cursor.position();
            element.read(cursor, &what)?;
            return Ok(Raw { element, array: None, range: start..cursor.position() });
        }
        let element = Element::from_number(cursor.u32(&what)?, key)?;
        let len = usize::try_from(cursor.u64(&what)?).unwrap_or(usize::MAX);
        let start = cursor.position();
        match element.size() {
            Some(size) => {
                cursor.take(len.saturating_mul(size), &what)?;
            }
            None => {
                for _ in 0..len {
                    cursor.string(&what)?;
                }
            }
        }
        Ok(Raw { element, array: Some(len), range: start..cursor.position() })
    }

    pub(super) fn value<'a>(&self, file: &'a [u8]) -> Value<'a> {
        let bytes = &file[self.range.clone()];
        match self.array {
            Some(len) => Value::Array(Array { element: self.element, len, bytes }),
            None => self
                .element
                .read(&mut Cursor::new(bytes), "a value")
                .expect("`Raw::read` has read the same bytes with success"),
        }
    }
}
