"""Alembic's entry: runs the revisions on the connection that the store hands over, inside the store's transaction."""

from __future__ import annotations

from alembic import context

from tuning_db.schema import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
