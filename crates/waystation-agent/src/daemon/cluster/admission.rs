//! Which copies are taken of those that other agents bring: the ones that the machine keeps.

use std::sync::Arc;

use waystation_format::slot::{Key, Sums};
use waystation_format::{Error, Kind, Result};

use super::Shared;
use super::names::Shard;
use crate::peers::Name;
use crate::peers::bulk::Admission;

/// Asks the machine.
#[derive(Debug)]
pub(super) struct Door(pub Arc<Shared>);

impl Admission for Door {
    fn expect(&self, from: &Name, key: &Key) -> Result<()> {
        let from = self.0.agent_of(from)?;
        let shard = named(key)?;
        if !self.0.lock().driver.expects(from, shard.key(key.version)) {
            return Err(refused(key));
        }
        self.0.make_room();
        Ok(())
    }

    fn keep(&self, from: &Name, key: &Key, sums: Sums) -> Result<()> {
        let (from, shard) = (self.0.agent_of(from)?, named(key)?);
        let (named, copy) = (shard.key(key.version), shard.copy(sums.digest));
        let mut inner = self.0.lock();
        let effects = inner.driver.arrive(from, named, copy);
        self.0.carry_out(&mut inner, effects);
        let is_copy = inner.driver.agent().is_some_and(|agent| agent.memory().copies.contains_key(&named));
        if is_copy {
            self.0.guests.remove(key);
        }
        if is_copy || self.0.guests.contains(key) {
            return Ok(());
        }
        inner.unfreed.insert(named);
        self.0.free_unneeded(&mut inner);
        Err(refused(key))
    }
}

fn named(key: &Key) -> Result<Shard> {
    Shard::parse(&key.shard).ok_or_else(|| {
        Error::new(Kind::InvalidInput, "the agents keep no shards of such names").with("shard", &*key.shard)
    })
}

fn refused(key: &Key) -> Error {
    Error::new(Kind::Cancelled, "the version is not kept here, or not now")
        .with("shard", &*key.shard)
        .with("step", key.version.step.to_string())
}
