//! Errors on their way to another process, where they are again what they were.

use serde::{Deserialize, Serialize};
use waystation_format::{Error, Kind};

/// An error.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Refusal {
    /// The name of its kind.
    pub kind: String,
    /// What failed and why.
    pub message: String,
    /// Where.
    pub context: Vec<(String, String)>,
}

/// Keys of contexts that an error has here again. What an agent of another release says beyond them becomes
/// part of the message.
const CONTEXT_KEYS: [&str; 26] = [
    "actual",
    "array",
    "block",
    "cap_bytes",
    "committed_epoch",
    "committed_step",
    "data_bytes",
    "entry",
    "epoch",
    "errno",
    "expected",
    "found",
    "host",
    "limit_bytes",
    "nbytes",
    "offset",
    "path",
    "peer",
    "process",
    "program",
    "readers",
    "shard",
    "slot",
    "slot_bytes",
    "step",
    "ticket",
];

impl From<&Error> for Refusal {
    fn from(error: &Error) -> Self {
        let context = error.contexts().iter().map(|(key, value)| ((*key).to_owned(), value.clone()));
        Self {
            kind: error.kind().name().to_owned(),
            message: error.message().to_owned(),
            context: context.collect(),
        }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        let kind = Kind::ALL.into_iter().find(|kind| kind.name() == refusal.kind).unwrap_or(Kind::Internal);
        let known = |key: &str| CONTEXT_KEYS.into_iter().find(|known| *known == key);
        let (known, others): (Vec<_>, Vec<_>) = refusal
            .context
            .into_iter()
            .map(|(key, value)| (known(&key), key, value))
            .partition(|(known, ..)| known.is_some());
        let others: Vec<String> =
            others.into_iter().map(|(_, key, value)| format!("{key}: {value}")).collect();
        let message = if others.is_empty() {
            refusal.message
        } else {
            format!("{} ({})", refusal.message, others.join(", "))
        };
        known.into_iter().fold(Error::new(kind, message), |error, (key, _, value)| match key {
            Some(key) => error.with(key, value),
            None => error,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_arrives_as_it_was_and_what_is_unknown_becomes_part_of_its_message() {
        let sent = Error::new(Kind::Fenced, "too late").with("slot", "3").with("weather", "rain");
        let arrived = Error::from(Refusal::from(&sent));
        assert_eq!((arrived.kind(), arrived.message()), (Kind::Fenced, "too late (weather: rain)"));
        assert_eq!(arrived.contexts(), [("slot", "3".to_owned())]);
        let unknown = Refusal { kind: "Tired".to_owned(), message: "no".to_owned(), context: Vec::new() };
        assert_eq!(Error::from(unknown).kind(), Kind::Internal);
    }
}
