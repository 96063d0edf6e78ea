"""The assignment of tiles to programs, and their order: query tiles in forward, key tiles in backward.

The producer and the consumers of a program compute the tile from its position, so only the position is communicated.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from cs336_systems.kernels.copy_engine import aggregate


@gluon.jit
def item_in_section(position, n_tiles, n_heads, section_heads):
    """(rank of the tile, head) at a position. Sections of heads follow each other; in one, all heads' tiles by rank."""
    section_items = section_heads * n_tiles
    first_head = position // section_items * section_heads
    heads_here = gl.minimum(section_heads, n_heads - first_head)
    within = position % section_items
    return within // heads_here, first_head + within % heads_here


class Plan:
    """The fields that both plans share."""

    n_queries: gl.tensor
    n_keys: gl.tensor
    n_heads: gl.tensor
    n_batch_heads: gl.tensor
    group: gl.tensor
    section_heads: gl.tensor
    CAUSAL: gl.constexpr
    BLOCK_Q: gl.constexpr
    BLOCK_K: gl.constexpr

    @gluon.jit
    def n_tiles(self):
        return gl.cdiv(self.n_queries, self.BLOCK_Q)


@aggregate
class QueryPlan(Plan):
    """The order in which programs take query tiles.

    Positions go section by section; a section is ``section_heads`` query heads whose keys and values fit the L2 cache
    together. Inside a section the longest tiles of all its heads come first. Program p takes position p and, when that
    is loaded, the next position that no program has taken.
    """

    @gluon.jit
    def n_items(self):
        return self.n_tiles() * self.n_batch_heads

    @gluon.jit
    def item(self, position):
        """(batch, head, first query, key tiles) of a query tile."""
        rank, batch_head = item_in_section(position, self.n_tiles(), self.n_batch_heads, self.section_heads)
        first_query = (self.n_tiles() - 1 - rank if self.CAUSAL else rank) * self.BLOCK_Q
        n_key_tiles = self.n_key_tiles(first_query, self.BLOCK_Q)
        return batch_head // self.n_heads, batch_head % self.n_heads, first_query, n_key_tiles

    @gluon.jit
    def n_key_tiles(self, first_query, n_rows: gl.constexpr):
        """The number of key tiles that these queries see: at least one, fully masked for queries that see none."""
        end = self.n_keys
        if self.CAUSAL:
            end += gl.minimum(first_query + n_rows, self.n_queries) - self.n_queries
        return gl.maximum(gl.cdiv(gl.where(first_query < self.n_queries, end, 0), self.BLOCK_K), 1)

    @gluon.jit
    def document_tile(self, starts, batch, query):
        """The key tile in which a query's document begins; for a query past the last, as for the last."""
        place = batch * self.n_queries + gl.minimum(query, self.n_queries - 1)
        return gl.load(starts + place) // self.BLOCK_K

    @gluon.jit
    def document_tiles(self, starts, batch, first_query, n_rows: gl.constexpr, first_loaded):
        """(n_key_tiles, how many of the last ones these queries see, the last tile in which a document begins).

        Queries past the last see the first tile that is loaded, as each must see one.
        """
        n_key_tiles = gl.maximum(self.n_key_tiles(first_query, n_rows), first_loaded + 1)
        n_own = gl.maximum(n_key_tiles - self.document_tile(starts, batch, first_query), 1)
        return n_key_tiles, n_own, self.document_tile(starts, batch, first_query + n_rows - 1)

    @gluon.jit
    def n_clear(self, first_query):
        """The number of key tiles that all queries from ``first_query`` on see entirely: those need no mask."""
        keys = gl.maximum(first_query + self.n_keys - self.n_queries + 1, 0) if self.CAUSAL else self.n_keys
        return keys // self.BLOCK_K


@aggregate
class KeyTile:
    """128 keys and the query tiles that see them, in every query head that shares them."""

    batch: gl.tensor
    kv_head: gl.tensor
    first_key: gl.tensor
    first_tile: gl.tensor
    end_tile: gl.tensor
    """With packed documents the query tile after the last that sees these keys, if any; else 0, and unused."""


@aggregate
class KeyPlan(Plan):
    """The order in which programs take key tiles.

    As in ``QueryPlan``, but with key/value heads: the queries, output gradients and dq that their key tiles share fit
    the L2 cache. A section has more heads if its programs would not end together (``host.balanced_section``). Key tiles
    of a head come from the first to the last: if causal, the longest first.

    If dq is summed in order, key tiles come from the last to the first and add to a dq tile in that order. Each starts
    at the first query that sees it (if causal, at its diagonal), where the previous tile has already added. In the
    opposite order, each tile would wait for the previous one to catch up.
    """

    padded: gl.tensor
    ORDERED: gl.constexpr
    PACKED: gl.constexpr

    @gluon.jit
    def n_items(self):
        return gl.cdiv(self.n_keys, self.BLOCK_K) * self.n_batch_heads

    @gluon.jit
    def key_tile(self, position, ends):
        n_key_tiles = gl.cdiv(self.n_keys, self.BLOCK_K)
        rank, batch_head = item_in_section(position, n_key_tiles, self.n_batch_heads, self.section_heads)
        if self.ORDERED:
            rank = n_key_tiles - 1 - rank
        first_key = rank * self.BLOCK_K
        first_tile = rank * 0
        if self.CAUSAL:
            first_tile = gl.maximum(first_key - (self.n_keys - self.n_queries), 0) // self.BLOCK_Q
        n_kv_heads = self.n_heads // self.group
        end_tile = rank * 0
        if self.PACKED:
            last_key = gl.minimum(first_key + self.BLOCK_K, self.n_keys) - 1
            end_tile = gl.cdiv(self.document_end(ends, batch_head // n_kv_heads, last_key), self.BLOCK_Q)
            end_tile = gl.maximum(end_tile, first_tile + 1)  # keys that no query sees visit one fully masked tile
        return KeyTile(batch_head // n_kv_heads, batch_head % n_kv_heads, first_key, first_tile, end_tile)

    @gluon.jit
    def document_end(self, ends, batch, key):
        """The first query after a key's document; for a key past the last, as for the last."""
        place = batch * self.n_keys + gl.minimum(key, self.n_keys - 1)
        return gl.load(ends + place)

    @gluon.jit
    def end_tile(self, work):
        """The query tile after the last that sees the keys of ``work``."""
        return work.end_tile if self.PACKED else self.n_tiles()

    @gluon.jit
    def n_steps(self, work):
        return self.group * (self.end_tile(work) - work.first_tile)

    @gluon.jit
    def after(self, work, head, tile, head_step):
        """The (head, tile) that follows: the next tile, or the first one of the next head, ``head_step`` further."""
        last = tile + 1 == self.end_tile(work)
        return gl.where(last, head + head_step, head), gl.where(last, work.first_tile, tile + 1)

    @gluon.jit
    def adds_before(self, key_tile, first_query):
        """If dq is summed in order: how many key tiles add to the dq tile of ``first_query`` before this one."""
        n_key_tiles = gl.cdiv(self.n_keys, self.BLOCK_K)
        if self.CAUSAL:
            end = first_query + self.BLOCK_Q + self.n_keys - self.n_queries
            n_key_tiles = gl.minimum(n_key_tiles, gl.cdiv(end, self.BLOCK_K))
        return n_key_tiles - 1 - key_tile

    @gluon.jit
    def first_row(self, work):
        """The first query head's row in the statistics and the sums of dq, which have ``padded`` rows per head."""
        return (work.batch * self.n_heads + work.kv_head * self.group) * self.padded

    @gluon.jit
    def first_clear(self, first_key, n_keys_here: gl.constexpr):
        """The first query tile that needs no mask for these keys."""
        if self.CAUSAL:
            clear = gl.cdiv(gl.maximum(first_key + n_keys_here - 1 - (self.n_keys - self.n_queries), 0), self.BLOCK_Q)
        else:
            clear = gl.where(first_key + n_keys_here > self.n_keys, self.n_tiles(), 0)
        return clear
