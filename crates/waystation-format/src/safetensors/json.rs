//! A reader of just the JSON that a safetensors header, an index or checksums may hold: objects of strings, arrays of
//! unsigned integers, strings; and other values, which are stepped over.
//!
//! Invariants: no recursion, and nothing kept of what is stepped over but how deep it is, so depth and
//! unknown content cannot cost anything; `at` is always on a character boundary; strings come back
//! decoded, so that two spellings of one key are equal.

use std::borrow::Cow;
use std::collections::HashSet;

use super::LENGTH_BYTES;
use crate::{Error, Kind, Result};

/// Most characters of a text that an error shows.
const SHOWN_CHARACTERS: usize = 100;

/// Most lists and objects in each other, in what is stepped over.
const DEPTH_LIMIT: usize = 64;

/// A position in a text.
pub(super) struct Scanner<'a> {
    text: &'a str,
    at: usize,
    /// What the text is, for people.
    subject: &'static str,
    /// Where the text begins in its file.
    begin: u64,
}

impl<'a> Scanner<'a> {
    /// The begin of the header of a safetensors file.
    pub(super) fn of_header(text: &'a str) -> Self {
        Self { text, at: 0, subject: "header", begin: LENGTH_BYTES }
    }

    /// The begin of an index.
    pub(super) fn of_index(text: &'a str) -> Self {
        Self { text, at: 0, subject: "index", begin: 0 }
    }

    /// The begin of a file of checksums.
    pub(super) fn of_sums(text: &'a str) -> Self {
        Self { text, at: 0, subject: "file of checksums", begin: 0 }
    }

    /// An error about the present position.
    pub(super) fn fault(&self, message: impl Into<Cow<'static, str>>) -> Error {
        Error::new(Kind::Corrupt, message).with("offset", (self.begin + self.at as u64).to_string())
    }

    /// Refuses a key that was there before, and more keys than anyone needs.
    pub(super) fn remember(
        &self,
        seen: &mut HashSet<Cow<'a, str>>,
        key: Cow<'a, str>,
        limit: usize,
    ) -> Result<()> {
        if seen.len() == limit {
            return Err(self.fault(format!("the {} has more than {limit} entries", self.subject)));
        }
        match seen.replace(key) {
            None => Ok(()),
            Some(key) => Err(self.fault(format!("the {} has the key {} twice", self.subject, shown(&key)))),
        }
    }

    /// Consumes `byte`, after white space; `what` names it for people.
    pub(super) fn expect(&mut self, byte: u8, what: &'static str) -> Result<()> {
        self.skip_space();
        if self.peek() == Some(byte) {
            self.at += 1;
            return Ok(());
        }
        let (subject, found) = (self.subject, self.found());
        Err(self.fault(format!("the {subject} is not valid: expected {what}, found {found}")))
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
                return Err(
                    self.fault(format!("a list in the {} has more than {limit} numbers", self.subject))
                );
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
            Some(_) => Err(self.fault(format!("the {} goes on after its JSON object", self.subject))),
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
                Some(_) => return Err(self.fault("a string holds a raw control character")),
                None => return Err(self.fault(format!("the {} ends inside a string", self.subject))),
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
            return Err(self.fault("a number begins with 0"));
        }
        let value = digits.parse().map_err(|_| self.fault("a number exceeds 64 bits"))?;
        self.at += length;
        Ok(value)
    }

    /// Steps over a value of any kind.
    pub(super) fn skip_value(&mut self) -> Result<()> {
        let mut closes = Vec::new(); // of the lists and objects that are open
        let mut first = self.skip_scalar_or_open(&mut closes)?;
        while let Some(&close) = closes.last() {
            if !self.next_item(first, close)? {
                closes.pop();
                first = false;
                continue;
            }
            if close == b'}' {
                self.string()?;
                self.expect(b':', "':'")?;
            }
            first = self.skip_scalar_or_open(&mut closes)?;
        }
        Ok(())
    }

    /// Steps over a scalar, or into a list or object; tells which.
    fn skip_scalar_or_open(&mut self, closes: &mut Vec<u8>) -> Result<bool> {
        self.skip_space();
        match self.peek() {
            Some(b'"') => self.string().map(|_| false),
            Some(open @ (b'[' | b'{')) => {
                if closes.len() == DEPTH_LIMIT {
                    return Err(self.fault(format!("the {} is more than {DEPTH_LIMIT} deep", self.subject)));
                }
                closes.push(if open == b'[' { b']' } else { b'}' });
                self.at += 1;
                Ok(true)
            }
            _ => self.skip_word().map(|()| false),
        }
    }

    /// Steps over a number, `true`, `false` or `null`.
    fn skip_word(&mut self) -> Result<()> {
        let rest = &self.text.as_bytes()[self.at..];
        let is_part = |byte: &u8| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'-' | b'.');
        let length = rest.iter().position(|byte| !is_part(byte)).unwrap_or(rest.len());
        let word = &self.text[self.at..self.at + length];
        if !(matches!(word, "true" | "false" | "null") || is_number(word)) {
            let (subject, found) = (self.subject, self.found());
            return Err(self.fault(format!("the {subject} is not valid: expected a value, found {found}")));
        }
        self.at += length;
        Ok(())
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
            _ => return Err(self.fault("a string holds an unknown escape")),
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
            .ok_or_else(|| self.fault("a string holds a lone surrogate, which is no text"))
    }

    /// The four digits of `\uXXXX`.
    fn code_unit(&mut self) -> Result<u32> {
        let bytes = self.text.as_bytes().get(self.at..self.at + 6);
        let digits = bytes.filter(|bytes| bytes.starts_with(b"\\u")).map(|bytes| &bytes[2..]);
        let value = digits.and_then(|digits| {
            digits.iter().try_fold(0, |value, &digit| Some(value * 16 + char::from(digit).to_digit(16)?))
        });
        let value = value.ok_or_else(|| self.fault("a string holds an unknown escape"))?;
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

/// A text for an error, quoted, and cut where it is long.
pub(super) fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_CHARACTERS) {
        None => format!("{text:?}"),
        Some((end, _)) => format!("{:?}…", &text[..end]),
    }
}

/// Whether a word is a number of JSON.
fn is_number(word: &str) -> bool {
    let unsigned = word.strip_prefix('-').unwrap_or(word);
    let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
        None => (unsigned, None),
        Some((mantissa, exponent)) => (mantissa, Some(exponent.strip_prefix(['+', '-']).unwrap_or(exponent))),
    };
    let (whole, fraction) = match mantissa.split_once('.') {
        None => (mantissa, None),
        Some((whole, fraction)) => (whole, Some(fraction)),
    };
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits(whole)
        && (whole == "0" || !whole.starts_with('0'))
        && fraction.is_none_or(digits)
        && exponent.is_none_or(digits)
}
