"""Command-line tools for checkpoints: conversion and inspection."""
