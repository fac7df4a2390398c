//! What the agent tells on stderr: a line for each event, `time=… event=… key=value …`, for people and programs.
//!
//! Values that are more than a word are quoted as JSON strings. That nobody reads stderr any more changes
//! nothing.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use waystation_format::Error;

/// Tells of an event.
pub(super) fn line(event: &str, pairs: &[(&str, String)]) {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut text = format!("time={:.3} event={event}", since.as_secs_f64());
    for (key, value) in pairs {
        text.push_str(&format!(" {key}={}", quoted(value)));
    }
    text.push('\n');
    // One write, so that lines of several threads do not mix; there is nobody to tell that it failed.
    drop(std::io::stderr().lock().write_all(text.as_bytes()));
}

/// Tells of an error.
pub(super) fn error(event: &str, error: &Error) {
    let mut pairs = vec![("kind", error.kind().name().to_owned()), ("message", error.message().to_owned())];
    pairs.extend(error.contexts().iter().map(|(key, value)| (*key, value.clone())));
    line(event, &pairs);
}

fn quoted(value: &str) -> String {
    let is_word = |byte: u8| byte.is_ascii_graphic() && !b"\"=\\".contains(&byte);
    if !value.is_empty() && value.bytes().all(is_word) {
        value.to_owned()
    } else {
        serde_json::Value::from(value).to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn values_cannot_break_a_line() {
        assert_eq!(quoted("slot-00001"), "slot-00001");
        assert_eq!(quoted(""), r#""""#);
        assert_eq!(quoted("a b"), r#""a b""#);
        assert_eq!(quoted("x\nevent=forged"), r#""x\nevent=forged""#);
        assert_eq!(quoted(r#"a"b"#), r#""a\"b""#);
    }
}
