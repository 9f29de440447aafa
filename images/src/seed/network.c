/* network-config, versions 1 and 2: for each NIC a file of lines, see seed.c. */
#include "yaml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

FILE *network_file(int number);

static void lines(FILE *f, const char *word, const struct node *n)
{
    if (!n)
        return;
    if (n->kind == SCALAR)
        fprintf(f, "%s %s\n", word, n->text);
    for (size_t i = 0; n->kind == SEQ && i < n->count; i++)
        lines(f, word, n->items[i]);
}

static void route(FILE *f, const char *to, const char *via, const char *metric)
{
    if (to)
        fprintf(f, "route %s %s %s\n", to, via ? via : "-", metric ? metric : "-");
}

/* 255.255.255.0 or 24 -> 24 */
static int prefix(const char *mask)
{
    unsigned a, b, c, d;
    if (sscanf(mask, "%u.%u.%u.%u", &a, &b, &c, &d) != 4)
        return atoi(mask);
    return __builtin_popcount((a & 255) << 24 | (b & 255) << 16 | (c & 255) << 8 | (d & 255));
}

static void with_prefix(char *out, size_t size, const char *address, const char *mask)
{
    if (!mask || strchr(address, '/'))
        snprintf(out, size, "%s", address);
    else
        snprintf(out, size, "%s/%d", address, prefix(mask));
}

static void identity(FILE *f, const char *name, const char *mac)
{
    if (mac)
        fprintf(f, "mac %s\n", mac);
    else if (name)
        fprintf(f, "name %s\n", name);
}

static void version2(const struct node *ethernets)
{
    for (size_t i = 0; ethernets && ethernets->kind == MAP && i < ethernets->count; i++) {
        struct node *e = ethernets->items[i], *match = yaml_get(e, "match"), *routes = yaml_get(e, "routes");
        const char *name = yaml_text(match, "name");
        FILE *f = network_file((int)i);
        identity(f, name ? name : ethernets->keys[i], yaml_text(match, "macaddress"));
        if (yaml_true(e, "dhcp4"))
            fprintf(f, "dhcp\n");
        lines(f, "addr", yaml_get(e, "addresses"));
        lines(f, "mtu", yaml_get(e, "mtu"));
        route(f, yaml_text(e, "gateway4") ? "default" : NULL, yaml_text(e, "gateway4"), NULL);
        route(f, yaml_text(e, "gateway6") ? "default" : NULL, yaml_text(e, "gateway6"), NULL);
        for (size_t j = 0; routes && routes->kind == SEQ && j < routes->count; j++)
            route(f, yaml_text(routes->items[j], "to"), yaml_text(routes->items[j], "via"), yaml_text(routes->items[j], "metric"));
        lines(f, "dns", yaml_get(yaml_get(e, "nameservers"), "addresses"));
        lines(f, "search", yaml_get(yaml_get(e, "nameservers"), "search"));
        fclose(f);
    }
}

static void subnet(FILE *f, const struct node *s)
{
    const char *type = yaml_text(s, "type"), *address = yaml_text(s, "address"), *gateway = yaml_text(s, "gateway");
    struct node *routes = yaml_get(s, "routes");
    char text[200];

    if (type && (!strcmp(type, "dhcp") || !strcmp(type, "dhcp4")))
        fprintf(f, "dhcp\n");
    if (address) {
        with_prefix(text, sizeof text, address, yaml_text(s, "netmask"));
        fprintf(f, "addr %s\n", text);
    }
    route(f, gateway ? "default" : NULL, gateway, NULL);
    for (size_t i = 0; routes && routes->kind == SEQ && i < routes->count; i++) {
        const struct node *r = routes->items[i];
        const char *to = yaml_text(r, "network") ? yaml_text(r, "network") : yaml_text(r, "destination");
        if (!to)
            continue;
        with_prefix(text, sizeof text, to, yaml_text(r, "netmask"));
        route(f, text, yaml_text(r, "gateway"), yaml_text(r, "metric"));
    }
    lines(f, "dns", yaml_get(s, "dns_nameservers"));
    lines(f, "search", yaml_get(s, "dns_search"));
}

static void version1(const struct node *config)
{
    for (size_t i = 0; config && config->kind == SEQ && i < config->count; i++) {
        const struct node *c = config->items[i], *subnets = yaml_get(c, "subnets");
        const char *type = yaml_text(c, "type");
        if (!type || (strcmp(type, "physical") && strcmp(type, "nameserver")))
            continue;
        FILE *f = network_file((int)i);
        if (!strcmp(type, "nameserver")) {      /* for the whole guest: no NIC is named */
            lines(f, "dns", yaml_get(c, "address"));
            lines(f, "search", yaml_get(c, "search"));
        } else
            identity(f, yaml_text(c, "name"), yaml_text(c, "mac_address"));
        lines(f, "mtu", yaml_get(c, "mtu"));
        for (size_t j = 0; subnets && subnets->kind == SEQ && j < subnets->count; j++)
            subnet(f, subnets->items[j]);
        fclose(f);
    }
}

void network(const struct node *config)
{
    if (yaml_get(config, "network"))            /* some tools wrap it as in a netplan file */
        config = yaml_get(config, "network");
    version2(yaml_get(config, "ethernets"));
    version1(yaml_get(config, "config"));
}
