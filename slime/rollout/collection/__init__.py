"""Fills a training batch: decides which groups are kept, returned or dropped, and limits their age."""
