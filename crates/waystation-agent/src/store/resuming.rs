//! What an agent was receiving when it was killed: the next one has the rest of it sent.
//!
//! Blocks that a slot says to be in place were, with their checksums, before it said so, and memory outlives the process.
//! Invariants: a slot is gone on with only for the same version, of the same size, and only if nobody was given it since;
//! whoever seals it verifies all of it, what was there before included.

use waystation_format::Result;
use waystation_format::slot::{Header, Tenant};

use super::file::SlotFile;
use super::{Grant, Store};
use crate::slots::candidates;

/// What a dead writer has left in a slot that is free now.
#[derive(Clone, Debug)]
pub(super) struct Left {
    tenant: Tenant,
    /// The slot, as it was freed.
    freed: Header,
    blocks: u64,
}

impl Left {
    /// What is in the slot of a tenant that was freed; none if it is of no use.
    pub fn of(file: &SlotFile, tenant: &Tenant, freed: &Header) -> Option<Self> {
        let most = tenant.regions()?.block_count();
        let blocks = file.progress().ok().filter(|&blocks| 0 < blocks && blocks <= most)?;
        Some(Self { tenant: tenant.clone(), freed: freed.clone(), blocks })
    }

    fn is_of(&self, tenant: &Tenant) -> bool {
        let sizes = |tenant: &Tenant| (tenant.contents_bytes, tenant.data_bytes);
        self.tenant.key == tenant.key && sizes(&self.tenant) == sizes(tenant)
    }
}

impl Store {
    /// As [`Store::begin`], for what another agent sends: with the slot in which a part of it is, if there is one. Returns
    /// how many blocks are in place.
    pub fn begin_incoming(&self, tenant: &Tenant) -> Result<(Grant, u64)> {
        let resumed = self.resume(tenant)?;
        resumed.map_or_else(|| self.begin(tenant).map(|grant| (grant, 0)), Ok)
    }

    fn resume(&self, tenant: &Tenant) -> Result<Option<(Grant, u64)>> {
        let mut known = self.lock();
        let Some(at) = known.left.iter().position(|left| left.is_of(tenant)) else { return Ok(None) };
        let left = known.left.swap_remove(at);
        let (slot, place) = (left.freed.slot, left.freed.slot as usize);
        let is_untouched = known.headers.get(place) == Some(&left.freed);
        self.check_tenant(&known, tenant)?;
        let may_have = candidates(&known.headers, &tenant.key, Self::limits(&known))?;
        if !is_untouched || !may_have.contains(&place) || !self.hand_over(&mut known, slot, tenant)? {
            return Ok(None);
        }
        let of_slot = self.slot(slot)?;
        // Where that cannot be said, all of it comes again.
        let file = of_slot.file();
        let blocks = file.set_progress(left.blocks).map_or(0, |()| left.blocks);
        let (path, ticket) = (file.path().to_owned(), known.headers[place].sequence);
        Ok(Some((Grant { slot, path, ticket, tenant: tenant.clone() }, blocks)))
    }

    /// Takes note of what was found.
    pub(super) fn remember_left(&self, left: Vec<Left>) {
        self.lock().left = left;
    }
}
