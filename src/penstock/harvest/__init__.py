"""Harvest: paged APIs synced by partition, consolidated, watermarked."""
