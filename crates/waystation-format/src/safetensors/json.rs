//! A reader of just the JSON that a safetensors header may hold: objects of strings, arrays of
//! unsigned integers, strings.
//!
//! Invariants: no recursion and no value that is skipped unread, so depth and unknown content cannot
//! cost anything; `at` is always on a character boundary; strings come back decoded, so that two
//! spellings of one key are equal.

use std::borrow::Cow;

use super::LENGTH_BYTES;
use crate::{Error, Kind, Result};

/// A position in the text of a header.
pub(super) struct Scanner<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Scanner<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        Self { text, at: 0 }
    }

    /// An error about the present position.
    pub(super) fn fault(&self, message: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Kind::Corrupt, message).with("offset", (LENGTH_BYTES + self.at as u64).to_string())
    }

    /// Consumes `byte`, after white space; `what` names it for people.
    pub(super) fn expect(&mut self, byte: u8, what: &'static str) -> Result<()> {
        self.skip_space();
        if self.peek() == Some(byte) {
            self.at += 1;
            return Ok(());
        }
        Err(self.fault(format!("the header is not valid: expected {what}, found {}", self.found())))
    }

    /// The next key of an object whose `{` is consumed, or nothing at its `}`. `first` says whether
    /// none has been read yet.
    pub(super) fn next_key(&mut self, first: bool) -> Result<Option<Cow<'a, str>>> {
        if !self.next_item(first, b'}')? {
            return Ok(None);
        }
        let key = self.string()?;
        self.expect(b':', "':'")?;
        Ok(Some(key))
    }

    /// Steps to the next element of a list, or over its `close`, telling which.
    pub(super) fn next_item(&mut self, first: bool, close: u8) -> Result<bool> {
        self.skip_space();
        if self.peek() == Some(close) {
            self.at += 1;
            return Ok(false);
        }
        if !first {
            self.expect(b',', "',' or the end of the list")?;
        }
        Ok(true)
    }

    /// An array of unsigned integers, at most `limit` of them.
    pub(super) fn integers(&mut self, limit: usize) -> Result<Vec<u64>> {
        self.expect(b'[', "a list of integers")?;
        let mut numbers = Vec::new();
        while self.next_item(numbers.is_empty(), b']')? {
            if numbers.len() == limit {
                return Err(self.fault(format!("a list in the header has more than {limit} numbers")));
            }
            numbers.push(self.integer()?);
        }
        Ok(numbers)
    }

    /// Nothing but white space may be left.
    pub(super) fn end(&mut self) -> Result<()> {
        self.skip_space();
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.fault("the header goes on after its JSON object")),
        }
    }

    /// A string, decoded.
    pub(super) fn string(&mut self) -> Result<Cow<'a, str>> {
        self.expect(b'"', "a string")?;
        let start = self.at;
        self.skip_plain();
        if self.peek() == Some(b'"') {
            self.at += 1;
            return Ok(Cow::Borrowed(&self.text[start..self.at - 1]));
        }
        let mut decoded = self.text[start..self.at].to_owned();
        loop {
            match self.peek() {
                Some(b'"') => break,
                Some(b'\\') => decoded.push(self.escape()?),
                Some(_) => return Err(self.fault("a string in the header holds a raw control character")),
                None => return Err(self.fault("the header ends inside a string")),
            }
            let start = self.at;
            self.skip_plain();
            decoded.push_str(&self.text[start..self.at]);
        }
        self.at += 1;
        Ok(Cow::Owned(decoded))
    }

    /// An unsigned integer.
    pub(super) fn integer(&mut self) -> Result<u64> {
        self.skip_space();
        let rest = &self.text.as_bytes()[self.at..];
        let length = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
        let digits = &self.text[self.at..self.at + length];
        let follows = rest.get(length).copied();
        if length == 0 || matches!(follows, Some(b'.' | b'e' | b'E')) {
            return Err(self.fault(format!("expected an unsigned integer, found {}", self.found())));
        }
        if length > 1 && digits.starts_with('0') {
            return Err(self.fault("a number in the header begins with 0"));
        }
        let value = digits.parse().map_err(|_| self.fault("a number in the header exceeds 64 bits"))?;
        self.at += length;
        Ok(value)
    }

    /// One escape sequence, its backslash included.
    fn escape(&mut self) -> Result<char> {
        let code = self.text.as_bytes().get(self.at + 1).copied();
        let plain = match code {
            Some(b'u') => return self.unicode_escape(),
            Some(code @ (b'"' | b'\\' | b'/')) => char::from(code),
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            _ => return Err(self.fault("a string in the header holds an unknown escape")),
        };
        self.at += 2;
        Ok(plain)
    }

    fn unicode_escape(&mut self) -> Result<char> {
        let first = self.code_unit()?;
        let code = match first {
            0xD800..=0xDBFF => {
                let second = self.code_unit().ok().filter(|unit| (0xDC00..=0xDFFF).contains(unit));
                second.map(|second| 0x10000 + ((first - 0xD800) << 10) + (second - 0xDC00))
            }
            _ => Some(first),
        };
        code.and_then(char::from_u32)
            .ok_or_else(|| self.fault("a string in the header holds a lone surrogate, which is no text"))
    }

    /// The four digits of `\uXXXX`.
    fn code_unit(&mut self) -> Result<u32> {
        let bytes = self.text.as_bytes().get(self.at..self.at + 6);
        let digits = bytes.filter(|bytes| bytes.starts_with(b"\\u")).map(|bytes| &bytes[2..]);
        let value = digits.and_then(|digits| {
            digits.iter().try_fold(0, |value, &digit| Some(value * 16 + char::from(digit).to_digit(16)?))
        });
        let value = value.ok_or_else(|| self.fault("a string in the header holds an unknown escape"))?;
        self.at += 6;
        Ok(value)
    }

    /// Moves over characters that stand for themselves.
    fn skip_plain(&mut self) {
        let rest = &self.text.as_bytes()[self.at..];
        let special = |byte: &u8| *byte == b'"' || *byte == b'\\' || *byte < 0x20;
        self.at += rest.iter().position(special).unwrap_or(rest.len());
    }

    fn skip_space(&mut self) {
        let rest = &self.text.as_bytes()[self.at..];
        let other = |byte: &u8| !matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        self.at += rest.iter().position(other).unwrap_or(rest.len());
    }

    fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    /// What stands here, for an error.
    fn found(&self) -> String {
        self.text[self.at..].chars().next().map_or_else(|| "the end".to_owned(), |found| format!("{found:?}"))
    }
}
