//! Text in Prometheus' exposition format, version 0.0.4.
//!
//! Invariants: a family is written once, with its help and type before its samples; a family without samples is
//! left out; whatever a label says, it stays within its quotes.

use std::fmt::Display;

/// What the answer of a scrape says that it is.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";
/// What all names begin with.
const PREFIX: &str = "waystation_agent_";

/// A label of a sample: its name and value.
pub(super) type Label<'a> = (&'a str, &'a str);

/// What kind of number a family holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Type {
    /// Goes up and down.
    Gauge,
    /// Only grows, until the agent is replaced; its name ends in `_total`.
    Counter,
}

/// Text that grows by families.
#[derive(Debug, Default)]
pub(super) struct Exposition(String);

impl Exposition {
    /// A family of one sample, if there is a value.
    pub fn one(&mut self, of: Type, name: &str, help: &str, value: impl Into<Option<f64>>) {
        self.family(of, name, help, value.into().map(|value| (Vec::new(), value)));
    }

    /// A family of samples that differ by their labels.
    pub fn family<'a>(
        &mut self,
        of: Type,
        name: &str,
        help: &str,
        samples: impl IntoIterator<Item = (Vec<Label<'a>>, f64)>,
    ) {
        let mut samples = samples.into_iter().peekable();
        if samples.peek().is_none() {
            return;
        }
        self.head(name, help, if of == Type::Gauge { "gauge" } else { "counter" });
        for (labels, value) in samples {
            self.sample(name, &labels, value);
        }
    }

    /// How often something has happened, and how long all of it took.
    pub fn summary(&mut self, name: &str, help: &str, seconds: f64, count: u64) {
        self.head(name, help, "summary");
        self.sample(&format!("{name}_sum"), &[], seconds);
        self.sample(&format!("{name}_count"), &[], count as f64);
    }

    /// The text so far.
    pub fn into_text(self) -> String {
        self.0
    }

    fn head(&mut self, name: &str, help: &str, of: &str) {
        self.write(format_args!("# HELP {PREFIX}{name} {}\n", escaped(help, false)));
        self.write(format_args!("# TYPE {PREFIX}{name} {of}\n"));
    }

    fn sample(&mut self, name: &str, labels: &[Label<'_>], value: f64) {
        self.write(format_args!("{PREFIX}{name}"));
        for (place, (label, text)) in labels.iter().enumerate() {
            let before = if place == 0 { '{' } else { ',' };
            self.write(format_args!("{before}{label}=\"{}\"", escaped(text, true)));
        }
        self.write(format_args!("{} {value}\n", if labels.is_empty() { "" } else { "}" }));
    }

    fn write(&mut self, text: impl Display) {
        self.0.push_str(&text.to_string());
    }
}

fn escaped(text: &str, is_quoted: bool) -> String {
    let escaped = text.replace('\\', r"\\").replace('\n', r"\n");
    if is_quoted { escaped.replace('"', r#"\""#) } else { escaped }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_have_the_form_that_is_specified() {
        let mut exposition = Exposition::default();
        exposition.one(Type::Gauge, "epoch", "The epoch.", 7.0);
        exposition.one(Type::Gauge, "newest_step", "None yet.", None);
        let samples = [(vec![("state", "free")], 3.0), (vec![("state", "a\"b\\c\nd"), ("host", "x")], 0.25)];
        exposition.family(Type::Counter, "slots_total", "Of\nslots\\.", samples);
        exposition.summary("wait_seconds", "Waits.", 1.5, 2);
        assert_eq!(
            exposition.into_text(),
            "# HELP waystation_agent_epoch The epoch.\n\
             # TYPE waystation_agent_epoch gauge\n\
             waystation_agent_epoch 7\n\
             # HELP waystation_agent_slots_total Of\\nslots\\\\.\n\
             # TYPE waystation_agent_slots_total counter\n\
             waystation_agent_slots_total{state=\"free\"} 3\n\
             waystation_agent_slots_total{state=\"a\\\"b\\\\c\\nd\",host=\"x\"} 0.25\n\
             # HELP waystation_agent_wait_seconds Waits.\n\
             # TYPE waystation_agent_wait_seconds summary\n\
             waystation_agent_wait_seconds_sum 1.5\n\
             waystation_agent_wait_seconds_count 2\n"
        );
    }
}
